r"""The boxed answer of a response: what stands in its last complete `\boxed{...}`.

A box is complete when its braces balance, so an answer that was cut off is no answer. `\fbox` and
`\framebox` are boxes too, and so is a bare `\boxed 5`. The response is read once, left to right.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sortedrl.rewards.tags import conclusion

_TOKEN = re.compile(
    r"(?P<box>\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*(?P<brace>\{)?)"
    r"|\\\\(?!boxed|fbox|framebox)"  # a line break: the brace after it is a real one
    r"|\\[{}]"
    r"|(?P<open>\{)"
    r"|(?P<close>\})"
)
_BARE = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?%?|[A-Za-z](?![A-Za-z])")


@dataclass(frozen=True, slots=True)
class _Box:
    """A complete box: where it stands, and where its content does."""

    start: int
    end: int
    inner: slice


def boxed_answer(
    response: str, *, after_thoughts: bool = True, is_prefilled: bool = False
) -> str | None:
    r"""What stands in the last complete box; `None` where there is none.

    After `</think>` only what follows counts, and thoughts that never end hold no answer;
    `is_prefilled` says that the prompt ends in `<think>`. Both are off without `after_thoughts`.

    >>> boxed_answer(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> boxed_answer(r"so \boxed{\frac{1}{2}") is None
    True
    """
    text = conclusion(response, is_prefilled=is_prefilled) if after_thoughts else response
    box = _last_box(text)
    return None if box is None else text[box.inner].strip()


def _last_box(text: str) -> _Box | None:
    last: _Box | None = None
    open_braces: list[re.Match[str] | None] = []  # the command for a box, None for other braces
    for token in _TOKEN.finditer(text):
        if token["brace"]:
            open_braces.append(token)
        elif token["box"]:
            bare = _BARE.match(text, token.end())
            if bare is not None:
                last = _Box(token.start(), bare.end(), slice(*bare.span()))
        elif token["open"]:
            open_braces.append(None)
        elif token["close"] and open_braces:
            command = open_braces.pop()
            if command is not None:
                last = _closed(text, command, token.start(), last)
    return last


def _closed(text: str, command: re.Match[str], end: int, last: _Box | None) -> _Box:
    """The box that ends here; around nothing but another box, it has the content of that one."""
    inner = slice(command.end(), end)
    if last is not None and last.start >= command.end():
        around = text[command.end() : last.start] + text[last.end : end]
        if not around.strip():
            inner = last.inner
    return _Box(command.start(), end + 1, inner)
