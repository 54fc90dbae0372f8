"""The config of a GGUF file from its header, without parsing the vocabulary.

    header: magic, version, counts | keys with values | names and sizes of tensors | data

transformers makes a config of the keys, but parses every token and merge on the way, ten seconds
for a large vocabulary. So it is given a file with the same keys and tensor names, in which long
lists are left out and tensors have one number. Of the data it only matters that it is there.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_MAGIC = b"GGUF"
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_LONGEST_LIST = 1024
_ALIGNMENT = 32
_TOKENS = "tokenizer.ggml.tokens"
_ARCHITECTURE = "general.architecture"
_NAME = "header.gguf"


def gguf_config(path: Path) -> Any:  # noqa: ANN401
    """The config that transformers reads from a GGUF file; damaged files raise of every kind."""
    from transformers import AutoConfig

    with TemporaryDirectory() as folder:
        (Path(folder) / _NAME).write_bytes(_short(path))
        config = AutoConfig.from_pretrained(folder, gguf_file=_NAME)
    config.name_or_path = str(path.parent)
    return config


def _short(path: Path) -> bytes:
    """A GGUF file with the same keys and tensor names, and hardly anything else."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Header(data).short()


class _Header:
    """Goes through the header of a file from its beginning."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def short(self) -> bytes:
        """The header with what matters for a config, and one number as data."""
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin as a GGUF file does")
        version, num_tensors, num_keys = self._unpack("<IQQ")
        keys, lengths, architecture = [], dict[str, int](), ""
        for _ in range(num_keys):
            start, name = self._at, self._string()
            length = self._value()
            if name == _ARCHITECTURE:
                architecture = self._data[start : self._at][-length:].decode()
            if length <= _LONGEST_LIST:
                keys.append(self._data[start : self._at])
            else:
                lengths[name] = length
        vocabulary = f"{architecture}.vocab_size".encode()
        if _TOKENS in lengths and not any(vocabulary in key for key in keys):
            keys.append(
                struct.pack("<Q", len(vocabulary))
                + vocabulary
                + struct.pack("<II", _UINT32, lengths[_TOKENS])
            )
        tensors = [self._tensor() for _ in range(num_tensors)]
        if tensors and self._at + max(offset for _, offset in tensors) >= len(self._data):
            raise ValueError("its tensors are cut off")
        names = [name for name, _ in tensors]
        head = _MAGIC + struct.pack("<IQQ", version, len(names), len(keys)) + b"".join(keys)
        # One dimension of one fp32 number, at the beginning of the data.
        head += b"".join(
            struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 1, 0, 0) for name in names
        )
        return head + bytes(-len(head) % _ALIGNMENT + _ALIGNMENT)

    def _value(self) -> int:
        """Skip a value; gives the length of a text or a list, 1 for a number."""
        (kind,) = self._unpack("<I")
        if kind == _STRING:
            return len(self._bytes())
        if kind != _ARRAY:
            self._take(_SIZES[kind])
            return 1
        inner, length = self._unpack("<IQ")
        if inner == _STRING:
            for _ in range(length):
                self._bytes()
        else:
            self._take(_SIZES[inner] * length)
        return int(length)

    def _tensor(self) -> tuple[bytes, int]:
        """Skip the entry of a tensor; gives its name and where its data begins."""
        name = self._bytes()
        (num_dimensions,) = self._unpack("<I")
        self._take(8 * num_dimensions)
        _, offset = self._unpack("<IQ")
        return name, offset

    def _string(self) -> str:
        return self._bytes().decode()

    def _bytes(self) -> bytes:
        (length,) = self._unpack("<Q")
        return self._take(length)

    def _unpack(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise ValueError("its header is cut off")
        found = self._data[self._at : end]
        self._at = end
        return found
