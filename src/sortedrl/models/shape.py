"""The sizes of a model, without loading its weights.

They come from the config of a hub name or a folder, the header of a GGUF file, or the spec `tiny`;
parameters are counted on a meta-device model, so they are exact. Shapes of a few public models are
built in, for planning without a network. These are decoders of one kind: query, key, value and
output projections, then a gated MLP, with a norm before each. Qwen2.5 has a bias on queries, keys
and values.

The config of a GGUF file is read from its header:

    header: magic, version, counts | keys with values | names and sizes of tensors | data

transformers builds a config from the keys, but parses every token and merge on the way, which takes
ten seconds for a large vocabulary. It is therefore given a file with the same keys and tensor
names, but without long lists, and with tensors of one number.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, NamedTuple

from sortedrl.errors import ModelError
from sortedrl.models.tiny import is_tiny, tiny_config, tiny_settings

_MAGIC = b"GGUF"
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_LONGEST_LIST = 1024
_ALIGNMENT = 32
_TOKENS = "tokenizer.ggml.tokens"
_ARCHITECTURE = "general.architecture"
_NAME = "header.gguf"


def gguf_config(path: Path) -> Any:  # noqa: ANN401
    """The config of a GGUF file; damaged files raise all kinds of errors."""
    from transformers import AutoConfig

    with TemporaryDirectory() as folder:
        (Path(folder) / _NAME).write_bytes(_short(path))
        config = AutoConfig.from_pretrained(folder, gguf_file=_NAME)
    config.name_or_path = str(path.parent)
    return config


def _short(path: Path) -> bytes:
    """A minimal GGUF file with the same keys and tensor names."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Header(data).short()


class _Header:
    """Parses the header of a GGUF file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def short(self) -> bytes:
        """A minimal header for a config, with one number as data."""
        if self._take(4) != _MAGIC:
            raise ValueError("it does not start with the GGUF magic number")
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
        # One dimension of one fp32 number, at the start of the data.
        head += b"".join(
            struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 1, 0, 0) for name in names
        )
        return head + bytes(-len(head) % _ALIGNMENT + _ALIGNMENT)

    def _value(self) -> int:
        """Skip a value; returns the length of a text or a list, 1 for a number."""
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
        """Skip a tensor entry; returns its name and its offset."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes that memory and speed depend on."""

    name: str
    parameters: int
    """Number of parameters; tied ones count once."""
    layers: int
    hidden: int
    """Width of the residual stream."""
    inner: int
    """Width of the MLP."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    """Context length of the model: prompt and answer tokens."""
    is_tied: bool
    """Whether the output layer shares the embedding."""
    linear_width: int
    """Sum of inputs and outputs over all linear layers except the output layer: the parameters of
    rank-1 adapters."""

    @property
    def output_parameters(self) -> int:
        """Parameters of the output layer that are not tied."""
        return 0 if self.is_tied else self.vocabulary * self.hidden

    def cache_token_bytes(self, number_bytes: int) -> int:
        """Size of the keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * number_bytes


def shape_of(name: str | Path) -> Shape:
    """The shape of a model: a hub name, a folder, a GGUF file or `tiny`."""
    if is_tiny(str(name)):
        return shape_of_config(tiny_config(tiny_settings(str(name))), name=str(name))
    from transformers import AutoConfig

    from sortedrl.models.loading import folder_and_gguf

    folder, gguf = folder_and_gguf(name)
    refuse_wrong_path(name)
    try:
        if gguf is not None and Path(name).is_file():
            config = gguf_config(Path(name))
        else:
            config = AutoConfig.from_pretrained(folder, gguf_file=gguf)
    except Exception as error:  # damaged files raise all kinds of errors
        raise ModelError(
            f"cannot read the sizes of {name}: {first_line(error)}{not_here(name)}; give the "
            "folder of a model (with its config.json), a GGUF file, tiny, or a hub name that can "
            "be reached"
        ) from error
    return shape_of_config(config, name=str(name))


def shape_of_config(config: Any, *, name: str) -> Shape:  # noqa: ANN401
    """The shape of a transformers config."""
    try:
        return _shape(config, name=name)
    except ModelError:
        raise
    except Exception as error:  # inconsistent numbers do too
        raise ModelError(f"{name} is not a causal language model: {first_line(error)}") from error


def _shape(config: Any, *, name: str) -> Shape:  # noqa: ANN401
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    values = config.get_text_config().to_dict()
    needed = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
    missing = [key for key in (*needed, "max_position_embeddings") if key not in values]
    if missing:
        raise ModelError(f"the config of {name} must have {', '.join(missing)}, but does not")
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    output = model.get_output_embeddings()
    return Shape(
        name=name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=values["num_hidden_layers"],
        hidden=hidden,
        inner=values.get("intermediate_size") or 4 * hidden,
        heads=heads,
        kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or hidden // heads,
        vocabulary=values["vocab_size"],
        context=values["max_position_embeddings"],
        is_tied=output.weight is model.get_input_embeddings().weight,
        linear_width=sum(
            layer.in_features + layer.out_features
            for layer in model.modules()
            if isinstance(layer, nn.Linear) and layer is not output
        ),
    )


def first_line(error: Exception) -> str:
    """The first line of an error, plus the second if the first ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def refuse_wrong_path(name: str | Path) -> None:
    """Refuse a missing path, which transformers would take for a hub name."""
    path = Path(name)
    folder = path.parent if path.suffix == ".gguf" else path
    is_path = str(name).startswith((".", "/", "~")) or len(folder.parts) > 2
    if is_path and not path.exists():
        raise ModelError(
            f"{name}: no such file or folder; give the folder of a model (with its config.json), "
            "a GGUF file, or a hub name (owner/name)"
        )
    if (path / "run.json").is_file() and not (path / "config.json").exists():
        raise ModelError(f"{name} is the folder of a run; its model is {path / 'model'}")


def not_here(name: str | Path) -> str:
    """The end of an error about a hub name, which may have been meant as a folder."""
    return "" if Path(name).exists() else f"; nor is there a folder {name}"


class _Decoder(NamedTuple):
    """A decoder with a gated MLP, as in Llama and Qwen."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    is_tied: bool
    has_bias: bool

    def shape(self, name: str, *, context: int) -> Shape:
        """The shape, computed from the sizes."""
        hidden, inner = self.hidden, self.inner
        head_dim = hidden // self.heads
        queries, keys = self.heads * head_dim, self.kv_heads * head_dim
        matrices = [
            *((hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)),
            *((hidden, inner), (hidden, inner), (inner, hidden)),
        ]
        biases = queries + 2 * keys if self.has_bias else 0
        layer = sum(wide * high for wide, high in matrices) + biases + 2 * hidden
        embeddings = self.vocabulary * hidden * (1 if self.is_tied else 2)
        return Shape(
            name=name,
            parameters=self.layers * layer + embeddings + hidden,
            layers=self.layers,
            hidden=hidden,
            inner=inner,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=head_dim,
            vocabulary=self.vocabulary,
            context=context,
            is_tied=self.is_tied,
            linear_width=self.layers * sum(wide + high for wide, high in matrices),
        )


# Layers, hidden, inner, heads, key/value heads, vocabulary.
_LLAMA_8B = _Decoder(32, 4096, 14336, 32, 8, 128256, is_tied=False, has_bias=False)
_QWEN_1_5B = _Decoder(28, 1536, 8960, 12, 2, 151936, is_tied=True, has_bias=True)
_QWEN_7B = _Decoder(28, 3584, 18944, 28, 4, 152064, is_tied=False, has_bias=True)
_QWEN_32B = _Decoder(64, 5120, 27648, 40, 8, 152064, is_tied=False, has_bias=True)
_LONG, _SHORT = 131072, 32768

KNOWN_SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        name: decoder.shape(name, context=context)
        for name, decoder, context in (
            ("meta-llama/Llama-3.1-8B", _LLAMA_8B, _LONG),
            ("meta-llama/Llama-3.1-8B-Instruct", _LLAMA_8B, _LONG),
            ("Qwen/Qwen2.5-1.5B", _QWEN_1_5B, _LONG),
            ("Qwen/Qwen2.5-1.5B-Instruct", _QWEN_1_5B, _SHORT),
            ("Qwen/Qwen2.5-7B", _QWEN_7B, _LONG),
            ("Qwen/Qwen2.5-7B-Instruct", _QWEN_7B, _SHORT),
            ("Qwen/Qwen2.5-32B", _QWEN_32B, _LONG),
            ("Qwen/Qwen2.5-32B-Instruct", _QWEN_32B, _SHORT),
        )
    }
)
"""Public models by their hub names."""
