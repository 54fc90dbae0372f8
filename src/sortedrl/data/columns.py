"""From records to rows: which column is the prompt, which the answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from sortedrl.data.files import Record
from sortedrl.data.row import Message, Row
from sortedrl.data.settings import DataSettings
from sortedrl.errors import DataError, unknown_name

_ROLES = ("system", "user", "assistant", "tool", "developer")


def rows_of(records: Iterable[Record], settings: DataSettings) -> Iterator[Row]:
    """The rows; one without a usable prompt is refused with its place."""
    for record in records:
        yield _row(record, settings)


def _row(record: Record, settings: DataSettings) -> Row:
    fields = dict(record.values)
    prompt = _prompt(_taken(fields, settings.prompt_field, record), record)
    if settings.answer_field is not None:
        fields["answer"] = _taken(fields, settings.answer_field, record)
    return Row(prompt=prompt, fields=fields, place=record.place)


def _taken(fields: dict[str, object], name: str, record: Record) -> object:
    if name not in fields:
        raise DataError(record.place, unknown_name("column", name, record.values))
    return fields.pop(name)


def _prompt(value: object, record: Record) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(record.place, "the prompt is empty; drop the row")
        return value
    if not isinstance(value, list) or not value:
        raise DataError(
            record.place,
            f"the prompt must be text or a list of chat messages, got {value!r:.80}; "
            "name another column as prompt_field",
        )
    return tuple(_message(message, record) for message in value)


def _message(message: object, record: Record) -> Message:
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        raise DataError(
            record.place, f"a chat message must have `role` and `content`, got {message!r:.80}"
        )
    role, content = message["role"], message["content"]
    if role not in _ROLES:
        raise DataError(record.place, unknown_name("role", str(role), _ROLES))
    if not isinstance(content, str):
        raise DataError(record.place, f"a message's content must be text, got {content!r:.80}")
    return {"role": role, "content": content}


def with_system(row: Row, system: str) -> Row:
    """The row with a system message before its prompt."""
    prompt = row.prompt
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
    if messages[0]["role"] == "system":
        raise DataError(row.place, "the row has a system message of its own; leave system out")
    return replace(row, prompt=({"role": "system", "content": system}, *messages))
