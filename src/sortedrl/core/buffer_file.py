"""A buffer on disk: one file with a JSON header and plain arrays for tokens, no pickle.

    sortedrl-buffer 1            format name and version
    {"payload_bytes": ...}       the header: one line of JSON
    ...                          the payload: token ids and log-probabilities, little-endian,
                                 in the order in which the header names them

The file is written to a temporary name and renamed, so an existing one stays valid until then.
Log-probabilities are restored bit for bit, as 32-bit numbers if they were stored so.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sortedrl.core.buffer import BufferState
from sortedrl.core.files import write_whole
from sortedrl.errors import BufferFileError
from sortedrl.types import Prompt, Segment, Trajectory

_MAGIC = b"sortedrl-buffer 1\n"
_LISTS = ("fresh", "returned", "ready", "outside")


def save_buffer(state: BufferState, path: Path) -> None:
    """Write the state atomically."""
    payload = _Payload()
    prompts = {t.prompt.id: t.prompt for _, t in _trajectories(state)}
    header: dict[str, object] = {
        "unit_size": state.unit_size,
        "next_group": state.next_group,
        "next_prompt": state.next_prompt,
        "num_trained": state.num_trained,
        "prompts": [
            [prompt.id, payload.tokens(prompt.tokens), dict(prompt.fields), prompt.end]
            for prompt in prompts.values()
        ],
    }
    rows: dict[str, list[object]] = {name: [] for name in _LISTS}
    for name, trajectory in _trajectories(state):
        rows[name].append(_row(trajectory, payload))
    header |= rows
    header["payload_bytes"] = len(payload.data)
    header["payload_sha256"] = hashlib.sha256(payload.data).hexdigest()
    try:
        line = json.dumps(header, separators=(",", ":")).encode()
    except TypeError as error:
        raise BufferFileError(
            f"{path}: prompt fields must be JSON values to be saved ({error})"
        ) from error
    write_whole(path, _MAGIC + line + b"\n" + payload.data)


def load_buffer(path: Path) -> BufferState:
    """Read a state; `BufferFileError` if the file is incomplete or not a saved buffer."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BufferFileError(f"{path}: cannot be read ({error.strerror})") from error
    if not content.startswith(_MAGIC):
        raise BufferFileError(
            f"{path}: not a saved buffer of this version (it must begin with "
            f"{_MAGIC.decode().strip()!r}); check the path"
        )
    line, newline, payload = content[len(_MAGIC) :].partition(b"\n")
    if not newline:
        raise BufferFileError(f"{path}: truncated in its header; use an older checkpoint")
    try:
        header = json.loads(line)
        found, expected = len(payload), header["payload_bytes"]
        if found != expected:
            raise BufferFileError(
                f"{path}: holds {found} bytes of tokens, but its header says {expected}; "
                "it is truncated or damaged, use an older checkpoint"
            )
        if hashlib.sha256(payload).hexdigest() != header["payload_sha256"]:
            raise BufferFileError(f"{path}: checksum differs; it is damaged, use an older one")
        return _state(header, _Reader(payload))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise BufferFileError(f"{path}: damaged header ({error!r}); use an older one") from error


def _trajectories(state: BufferState) -> list[tuple[str, Trajectory]]:
    lists = zip(_LISTS, (state.fresh, state.returned, state.ready, state.outside), strict=True)
    return [(name, trajectory) for name, trajectories in lists for trajectory in trajectories]


def _row(trajectory: Trajectory, payload: _Payload) -> list[object]:
    return [
        trajectory.prompt.id,
        trajectory.sample_index,
        trajectory.group,
        trajectory.seed,
        trajectory.attempt,
        trajectory.interruptions,
        trajectory.decoded_tokens,
        trajectory.finish_reason,
        trajectory.reward,
        dict(trajectory.reward_parts),
        [
            [
                segment.version,
                payload.tokens(segment.tokens),
                payload.logprobs(segment.logprobs),
                *([payload.tokens(segment.given)] if segment.given else ()),
            ]
            for segment in trajectory.segments
        ],
        *([payload.tokens(trajectory.given)] if trajectory.given else ()),
    ]


def _state(header: dict[str, Any], reader: _Reader) -> BufferState:
    prompts = {
        number: Prompt(
            id=number, tokens=reader.read(tokens), fields=fields, end=end[0] if end else None
        )
        for number, tokens, fields, *end in header["prompts"]
    }
    header = {"outside": []} | header  # buffers of versions without conversations have none
    lists = {
        name: tuple(_trajectory(row, prompts, reader) for row in header[name]) for name in _LISTS
    }
    return BufferState(
        unit_size=header["unit_size"],
        next_group=header["next_group"],
        next_prompt=header["next_prompt"],
        num_trained=header["num_trained"],
        **lists,
    )


def _trajectory(row: list[Any], prompts: dict[int, Prompt], reader: _Reader) -> Trajectory:
    prompt, sample, group, seed, attempt, interruptions, decoded, reason, *rest = row
    reward, parts, segments, *given = rest
    return Trajectory(
        prompt=prompts[prompt],
        sample_index=sample,
        group=group,
        seed=seed,
        attempt=attempt,
        interruptions=interruptions,
        segments=tuple(
            Segment(
                reader.read(tokens),
                reader.read(logprobs),
                version,
                reader.read(said[0]) if said else (),
            )
            for version, tokens, logprobs, *said in segments
        ),
        given=reader.read(given[0]) if given else (),
        decoded_tokens=decoded,
        finish_reason=reason,
        reward=reward,
        reward_parts=parts,
    )


class _Payload:
    """Collects arrays, and describes each for reading it back."""

    def __init__(self) -> None:
        self.data = bytearray()

    def tokens(self, values: Sequence[int]) -> list[int | str]:
        """Token ids; a plain range, as the simulator produces, is stored as its bounds."""
        if isinstance(values, range) and values.step == 1:
            return ["range", values.start, values.stop]
        return self._add(array("i", values))

    def logprobs(self, values: Sequence[float]) -> list[int | str]:
        """Log-probabilities, in their own precision."""
        is_single = isinstance(values, array) and values.typecode == "f"
        return self._add(array("f" if is_single else "d", values))

    def _add(self, items: array[int] | array[float]) -> list[int | str]:
        if sys.byteorder == "big":
            items.byteswap()
        self.data += items.tobytes()
        return [items.typecode, len(items)]


class _Reader:
    """Reads arrays in the order in which they were added."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0

    def read(self, description: list[Any]) -> Sequence[Any]:
        """The array, or range, that the description names."""
        typecode, *bounds = description
        if typecode == "range":
            return range(*bounds)
        items = array(typecode)
        end = self._place + bounds[0] * items.itemsize
        items.frombytes(self._data[self._place : end])
        self._place = end
        if sys.byteorder == "big":
            items.byteswap()
        return items
