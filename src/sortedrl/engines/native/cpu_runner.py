"""Forward passes on the CPU: rows packed without padding, attention by SDPA over the cache.

A request whose blocks are contiguous is read in place; others are gathered first.

Linear layers use oneDNN's packed products. These read the weights in the order they are used, which
for a few dozen rows is up to twice as fast, and sum each row in an order that does not depend on
the number of rows. The packed copy doubles the memory of the linear weights and is made again for
every version.

The matrix products below choose their summation order by shape, differently on each kind of
processor. Every row is batch-invariant all the same: attention is padded to numbers of rows and
keys that a probe at startup found to agree, and products of 16-bit weights that depend on the
number of rows are computed in parts of fixed size.

Axes: R rows, Q sampled rows, V vocabulary, H query heads, K key/value heads, G query heads per
key/value head, D head dimension, L keys of one request, N token places of the cache, Y layers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from sortedrl.engines.native.hf_model import HFModel, attention_shape
from sortedrl.engines.native.matmul import (
    fixed_rows,
    invariant_products,
    linear_layers,
    widened_fp32_logits,
)
from sortedrl.engines.native.planner import Plan, RowSpan
from sortedrl.engines.native.sampler import (
    SampledTokens,
    SamplerInputs,
    SamplerOutput,
    TokenFilters,
    choose,
    floors,
)
from sortedrl.engines.sampling import CacheSize
from sortedrl.models.attention_interface import AttentionInputs
from sortedrl.models.offload import Offloader

ROW_MULTIPLE = 8
"""Rows are padded to a multiple of this: smaller products have another summation order."""
_COMPARED_ROWS = (8, 16, 24, 32, 40, 64, 96, 128, 256)


def can_pack(model: nn.Module) -> bool:
    """Whether this build and this model can use packed products."""
    return bool(torch.backends.mkldnn.is_available()) and all(
        parameter.device.type == "cpu" and parameter.dtype == torch.float32
        for parameter in model.parameters()
    )


def packed_linears(model: nn.Module, *, rows: int) -> dict[nn.Module, Callable[[Tensor], Tensor]]:
    """For each linear layer, a forward with packed weights, best for about `rows` rows."""
    return {
        module: _packed(module, rows=rows)
        for module in model.modules()
        if type(module) is nn.Linear
    }


def _packed(linear: nn.Linear, *, rows: int) -> Callable[[Tensor], Tensor]:
    weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)
    bias: Tensor | None = linear.bias
    bias = bias.detach() if bias is not None else None
    product = torch.ops.mkldnn._linear_pointwise.default

    def forward(x: Tensor) -> Tensor:
        result: Tensor = product(x, weight, bias, "none", [], "")
        return result

    return forward


_LOG = logging.getLogger(__name__)
_QUERY_MULTIPLES = (4, 8, 16)
_KEY_MULTIPLE = 32
_KEY_SPLIT = 512
"""Attention sums over this many keys at a time; the rest is summed separately."""
_PROBED_QUERIES = (16, 32, 64, 192, 768)
"""Attention splits queries into blocks of 32, 64 or 256 rows, depending on their number."""
_VIEWS_PER_SLOT = 4
_NO_PLACES = torch.empty(0, dtype=torch.long)


class CpuRunner:
    """Runs plans synchronously."""

    lag = 0

    def __init__(self, hf_model: HFModel, *, size: CacheSize, slots: int) -> None:
        """Allocate the KV cache; the operating system commits its memory on use."""
        layers, heads, dim = attention_shape(hf_model.config)
        places = size.num_blocks * size.block_tokens
        self._hf_model = hf_model
        self._slots = slots
        self._block_tokens = size.block_tokens
        self._cache = CpuCache(
            torch.zeros(layers, heads, places, dim, dtype=hf_model.dtype),
            torch.zeros(layers, heads, places, dim, dtype=hf_model.dtype),
            num_views=_VIEWS_PER_SLOT * slots,
        )
        self._offloader = Offloader(keep_values=False)
        self._padding = attention_padding(dim, hf_model.dtype)
        self._can_pack = can_pack(hf_model.model)
        self._in_parts: frozenset[nn.Module] | None = None
        self.weights_changed()

    def weights_changed(self) -> None:
        """Pack the linear layers again."""
        model = self._hf_model.model
        if self._can_pack:
            self._hf_model.replaced = packed_linears(model, rows=self._slots)
            return
        replaced: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
        if self._hf_model.dtype != torch.float32:
            output = self._hf_model.output_layer
            replaced[output] = widened_fp32_logits(output)
        if self._in_parts is None:
            found = invariant_products(linear_layers(model), replaced, sizes=_COMPARED_ROWS)
            self._in_parts = frozenset(found)
        for layer in self._in_parts:
            replaced[layer] = fixed_rows(replaced.get(layer, layer.forward))
        self._hf_model.replaced = replaced

    def release(self) -> None:
        """Free the memory of the KV cache."""
        self._offloader.offload(self._cache.tensors)

    def restore(self) -> None:
        """Allocate the KV cache again."""
        self._offloader.onload()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> SamplerOutput:
        """Run a plan; returns the tokens of the sampled rows."""
        spans = plan.spans
        padding = -plan.num_rows % ROW_MULTIPLE
        tokens: list[int] = []
        positions: list[int] = []
        for span in spans:
            end = span.start + span.num_rows
            tokens += span.request.tokens[span.start : end]
            positions += range(span.start, end)
        attention = CpuPagedAttention(
            spans,
            self._cache,
            block_tokens=self._block_tokens,
            padding=padding,
            shapes=self._padding,
        )
        with self._hf_model.patched():
            logits_QV = self._hf_model.forward(
                torch.tensor(tokens + [0] * padding),
                torch.tensor(positions + [0] * padding),
                torch.arange(plan.num_sampled + -plan.num_sampled % ROW_MULTIPLE),
                attention,
            )[: plan.num_sampled]
        return sample(logits_QV, plan.sampled)

    def collect(self, ticket: object) -> SampledTokens:
        """The results of a launch, as lists."""
        assert isinstance(ticket, SamplerOutput), "tickets come from launch"
        return SampledTokens(
            tokens=ticket.tokens_Q.tolist(),
            logprobs=ticket.logprobs_Q.tolist(),
            gaps=ticket.gaps_Q.tolist(),
            expected_logprobs=ticket.expected_logprobs_Q.tolist(),
        )


def sample(logits_QV: Tensor, spans: Sequence[RowSpan]) -> SamplerOutput:
    """Sample a token for every sampled row."""
    requests = [span.request for span in spans for _ in range(span.num_rows)]
    after = [span.start + step + 1 for span in spans for step in range(span.num_rows)]
    settings = [request.sampling for request in requests]
    draw = SamplerInputs(
        streams_Q=torch.tensor([request.stream for request in requests], dtype=torch.long),
        positions_Q=torch.tensor(
            [p - request.prompt_tokens for p, request in zip(after, requests, strict=True)],
            dtype=torch.long,
        ),
        inverse_temperatures_Q=torch.tensor(
            [1 / s.temperature if s.temperature else 0.0 for s in settings]
        ),
        expected_Q=torch.tensor(
            [
                request.tokens[p] if p < len(request.tokens) else -1
                for p, request in zip(after, requests, strict=True)
            ],
            dtype=torch.long,
        ),
    )
    floors_Q = None
    if any(s.is_filtered for s in settings):
        size = logits_QV.shape[1]
        keep = TokenFilters(
            top_k_Q=torch.tensor([s.top_k or size for s in settings]),
            top_p_Q=torch.tensor([s.top_p for s in settings]),
            min_p_Q=torch.tensor([s.min_p for s in settings]),
        )
        floors_Q = floors(logits_QV, draw, keep)
    return choose(logits_QV, draw, floors_Q=floors_Q)


class CpuCache:
    """Keys and values of all layers, with a cache of the views that requests use."""

    def __init__(self, keys_YKND: Tensor, values_YKND: Tensor, *, num_views: int) -> None:
        """Keep up to `num_views` views."""
        self.layers = list(zip(keys_YKND.unbind(), values_YKND.unbind(), strict=True))
        self.num_places = keys_YKND.shape[2]
        self.tensors = (keys_YKND, values_YKND)
        self.views = lru_cache(maxsize=num_views)(self._views)

    def _views(self, first: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """For each layer, keys and values of a run of places, `[1, K, L, D]`."""
        keys, values = (
            tensor.narrow(2, first, count).unsqueeze(1).unbind() for tensor in self.tensors
        )
        return list(zip(keys, values, strict=True))


@dataclass(frozen=True, slots=True)
class AttentionPadding:
    """The numbers of query rows and keys at which attention gives a row the same bits."""

    query_multiple: int
    """Query rows come in multiples of this."""
    key_rests: tuple[int, ...]
    """Allowed remainders of the number of keys after parts of 512, ascending up to 512."""

    def padded_keys(self, count: int) -> int:
        """The number of keys to read for `count` keys; the rest is masked.

        >>> padding = AttentionPadding(query_multiple=4, key_rests=(32, 64, 384, 512))
        >>> [padding.padded_keys(count) for count in (1, 32, 40, 200, 400, 512, 600)]
        [32, 32, 64, 384, 512, 512, 896]
        """
        whole = (count - 1) // _KEY_SPLIT * _KEY_SPLIT
        return whole + next(rest for rest in self.key_rests if rest >= count - whole)


@lru_cache
def attention_padding(dim: int, dtype: torch.dtype) -> AttentionPadding:
    """Probe this machine with attention over random rows, at the shapes of passes.

    A number of keys is accepted if a row over it has the same bits as over 512 keys, of which the
    rest is masked.
    """
    generator = torch.Generator().manual_seed(dim)
    q_1QD, k_1LD, v_1LD = (
        torch.randn(1, 1, count, dim, generator=generator).to(dtype)[0]
        for count in (max(_PROBED_QUERIES), _KEY_SPLIT, _KEY_SPLIT)
    )

    def attended(queries: int, keys: int, seen: int) -> Tensor:
        mask_L = torch.where(torch.arange(keys) < seen, 0.0, -math.inf).to(dtype)
        return scaled_dot_product_attention(
            q_1QD[None, :, :queries],
            k_1LD[None, :, :keys],
            v_1LD[None, :, :keys],
            attn_mask=mask_L.expand(queries, keys),
        )[0, 0]

    def agree(keys: int, *queries: int) -> bool:
        whole_QD = attended(max(_PROBED_QUERIES), _KEY_SPLIT, keys)
        return all(
            torch.equal(attended(count, keys, keys), whole_QD[:count])
            for count in (*queries, *_PROBED_QUERIES)
        )

    with torch.inference_mode():
        multiple = next(
            (least for least in _QUERY_MULTIPLES if agree(_KEY_SPLIT, least, 3 * least)),
            None,
        )
        if multiple is None:
            multiple = _QUERY_MULTIPLES[-1]
            _LOG.warning(
                "attention over heads of %s in %s is not batch-invariant on this "
                "processor: answers may depend on what else is generated; use another dtype",
                dim, dtype,
            )  # fmt: skip
        rests = [
            keys
            for keys in range(_KEY_MULTIPLE, _KEY_SPLIT, _KEY_MULTIPLE)
            if agree(keys, multiple)
        ]
    return AttentionPadding(query_multiple=multiple, key_rests=(*rests, _KEY_SPLIT))


@dataclass(frozen=True, slots=True)
class _KeyRange:
    """The keys that one span reads: a contiguous range, or a list where blocks are scattered."""

    span: RowSpan
    row: int
    num_keys: int
    views: list[tuple[Tensor, Tensor]] | None
    places: Tensor

    def keys_and_values(self, cache: CpuCache, layer: int) -> tuple[Tensor, Tensor]:
        """Its keys and values of a layer, `[1, K, L, D]` each."""
        if self.views is not None:
            return self.views[layer]
        keys_KND, values_KND = cache.layers[layer]
        keys_KLD = keys_KND.index_select(1, self.places)
        return keys_KLD[None], values_KND.index_select(1, self.places)[None]

    def mask(self, *, window: int | None, repeats: int, padding: int) -> Tensor:
        """The additive attention mask, `[rows of the span x repeats, L]`."""
        rows = torch.arange(self.span.start, self.span.start + self.span.num_rows)[:, None]
        keys = torch.arange(self.num_keys)[None]
        is_seen = keys <= rows
        if window is not None:
            is_seen &= rows - keys < window
        mask = torch.where(is_seen, 0.0, -math.inf)
        return pad(mask.repeat(repeats, 1), (0, 0, 0, padding))


class CpuPagedAttention:
    """The attention of one forward pass on the CPU."""

    def __init__(
        self,
        spans: Sequence[RowSpan],
        cache: CpuCache,
        *,
        block_tokens: int,
        padding: int,
        shapes: AttentionPadding,
    ) -> None:
        """Compute once per pass what all layers share."""
        self._cache = cache
        self._shapes = shapes
        self._block_tokens = block_tokens
        self._padding = padding
        self._num_rows = sum(span.num_rows for span in spans)
        places = [place for span in spans for place in self._places(span)]
        self._places_R = torch.tensor(places)
        self._key_ranges = self._make_key_ranges(spans)
        self._masks: dict[tuple[int | None, int], list[Tensor]] = {}
        self._num_single = next(
            (i for i, span in enumerate(spans) if span.num_rows > 1), len(spans)
        )

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Write the new keys and values, then attend for each span."""
        layer, q_1HRD, scale, window = inputs.layer, inputs.q_1HRD, inputs.scale, inputs.window
        keys_KND, values_KND = self._cache.layers[layer]
        rows = self._num_rows
        keys_KND.index_copy_(1, self._places_R, inputs.k_1KRD[0, :, :rows])
        values_KND.index_copy_(1, self._places_R, inputs.v_1KRD[0, :, :rows])
        heads, kv_heads = q_1HRD.shape[1], keys_KND.shape[0]
        group = heads // kv_heads
        q_KGRD = q_1HRD[0].unflatten(0, (kv_heads, group))
        masks = self._masks_for(window, group)
        singles = self._num_single
        out_RKGD = q_1HRD.new_zeros(rows + self._padding, kv_heads, group, q_1HRD.shape[3])
        if singles:
            q_SKGD = pad(
                q_KGRD[:, :, :singles].permute(2, 0, 1, 3),
                (0, 0, 0, -group % self._shapes.query_multiple),
            )
            outs = [
                scaled_dot_product_attention(
                    q_1KGD,
                    *key_range.keys_and_values(self._cache, layer),
                    attn_mask=mask,
                    scale=scale,
                )
                for q_1KGD, key_range, mask in zip(
                    q_SKGD.split(1), self._key_ranges[:singles], masks[:singles], strict=True
                )
            ]
            out_RKGD[:singles] = torch.cat(outs)[:, :, :group]
        for key_range, mask in zip(self._key_ranges[singles:], masks[singles:], strict=True):
            count, row = key_range.span.num_rows, key_range.row
            q_KXD = q_KGRD[:, :, row : row + count].flatten(1, 2)
            q_KXD = pad(q_KXD, (0, 0, 0, -q_KXD.shape[1] % self._shapes.query_multiple))
            out_KXD = scaled_dot_product_attention(
                q_KXD[None],
                *key_range.keys_and_values(self._cache, layer),
                attn_mask=mask,
                scale=scale,
            )[0, :, : group * count]
            out_RKGD[row : row + count] = out_KXD.unflatten(1, (group, count)).permute(2, 0, 1, 3)
        return out_RKGD.flatten(1, 2)[None]

    def _masks_for(self, window: int | None, group: int) -> list[Tensor]:
        key = (window, group)
        if key not in self._masks:
            self._masks[key] = [
                key_range.mask(window=window, repeats=1, padding=0)
                if key_range.span.num_rows == 1
                else key_range.mask(
                    window=window,
                    repeats=group,
                    padding=-group * key_range.span.num_rows % self._shapes.query_multiple,
                )
                for key_range in self._key_ranges
            ]
        return self._masks[key]

    def _places(self, span: RowSpan) -> list[int]:
        size, blocks = self._block_tokens, span.request.blocks
        return [
            blocks[position // size] * size + position % size
            for position in range(span.start, span.start + span.num_rows)
        ]

    def _make_key_ranges(self, spans: Sequence[RowSpan]) -> list[_KeyRange]:
        key_ranges = []
        row = 0
        for span in spans:
            key_ranges.append(self._key_range(span, row))
            row += span.num_rows
        return key_ranges

    def _key_range(self, span: RowSpan, row: int) -> _KeyRange:
        size = self._block_tokens
        num_keys = self._shapes.padded_keys(span.start + span.num_rows)
        blocks = span.request.blocks[: -(-num_keys // size)]
        first = blocks[0] * size
        is_run = blocks[-1] - blocks[0] == len(blocks) - 1 and all(
            block == blocks[0] + i for i, block in enumerate(blocks)
        )
        if is_run and first + num_keys <= self._cache.num_places:
            views = self._cache.views(first, num_keys)
            return _KeyRange(span, row, num_keys, views, _NO_PLACES)
        starts = torch.tensor(blocks)[:, None] * size
        places = (starts + torch.arange(size)).flatten()
        places = pad(places, (0, max(0, num_keys - len(places))))[:num_keys]
        return _KeyRange(span, row, num_keys, None, places)
