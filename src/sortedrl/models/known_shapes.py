"""The shapes of a few public models, for planning where their configs are out of reach.

Both families are the same decoder: queries, keys, values and their output, then three matrices of
the feed-forward part, with a norm before each. Qwen2.5 has a bias on queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sortedrl.models.shape import Shape


def _decoder(
    name: str,
    *,
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    context: int,
    is_tied: bool,
    has_bias: bool,
) -> Shape:
    head_dim = hidden // heads
    queries, keys = heads * head_dim, kv_heads * head_dim
    matrices = [
        *((hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)),
        *((hidden, inner), (hidden, inner), (inner, hidden)),
    ]
    biases = queries + 2 * keys if has_bias else 0
    layer = sum(wide * high for wide, high in matrices) + biases + 2 * hidden
    embeddings = vocabulary * hidden * (1 if is_tied else 2)
    return Shape(
        name=name,
        parameters=layers * layer + embeddings + hidden,
        layers=layers,
        hidden=hidden,
        inner=inner,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        context=context,
        is_tied=is_tied,
        linear_width=layers * sum(wide + high for wide, high in matrices),
    )


def _llama_3_1_8b(name: str) -> Shape:
    return _decoder(
        name,
        layers=32,
        hidden=4096,
        inner=14336,
        heads=32,
        kv_heads=8,
        vocabulary=128256,
        context=131072,
        is_tied=False,
        has_bias=False,
    )


def _qwen_2_5_1_5b(name: str, context: int) -> Shape:
    return _decoder(
        name,
        layers=28,
        hidden=1536,
        inner=8960,
        heads=12,
        kv_heads=2,
        vocabulary=151936,
        context=context,
        is_tied=True,
        has_bias=True,
    )


def _qwen_2_5_7b(name: str, context: int) -> Shape:
    return _decoder(
        name,
        layers=28,
        hidden=3584,
        inner=18944,
        heads=28,
        kv_heads=4,
        vocabulary=152064,
        context=context,
        is_tied=False,
        has_bias=True,
    )


def _qwen_2_5_32b(name: str, context: int) -> Shape:
    return _decoder(
        name,
        layers=64,
        hidden=5120,
        inner=27648,
        heads=40,
        kv_heads=8,
        vocabulary=152064,
        context=context,
        is_tied=False,
        has_bias=True,
    )


def _by_name(*shapes: Shape) -> Mapping[str, Shape]:
    return MappingProxyType({shape.name: shape for shape in shapes})


KNOWN_SHAPES = _by_name(
    _llama_3_1_8b("meta-llama/Llama-3.1-8B"),
    _llama_3_1_8b("meta-llama/Llama-3.1-8B-Instruct"),
    _qwen_2_5_1_5b("Qwen/Qwen2.5-1.5B", 131072),
    _qwen_2_5_1_5b("Qwen/Qwen2.5-1.5B-Instruct", 32768),
    _qwen_2_5_7b("Qwen/Qwen2.5-7B", 131072),
    _qwen_2_5_7b("Qwen/Qwen2.5-7B-Instruct", 32768),
    _qwen_2_5_32b("Qwen/Qwen2.5-32B", 131072),
    _qwen_2_5_32b("Qwen/Qwen2.5-32B-Instruct", 32768),
)
"""Public models by their hub names."""
