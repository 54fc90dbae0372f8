"""Log-probabilities of tokens, without materialising the logits of all of them.

Logits are computed chunk by chunk in float32 and dropped; the backward pass recomputes them. Only
the hidden states and one number per token are kept between the two.

With p the probabilities of a row, y its token and t the temperature, the gradients are those of
log p_y = logit_y / t - logsumexp(logits / t) and of the entropy H = -sum p log p:

    d log p_y / d logits = (onehot_y - p) / t        dH / d logits = -p (log p + H) / t

Where only log p_y has a gradient, the factor of each row is left out of the [C, V] matrix and
multiplied into the hidden states instead, which are far smaller.

Axes: T tokens, C tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
_HALF = (torch.float16, torch.bfloat16)


def token_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """For each target its log-probability and, on request, the entropy of its distribution.

    Both are of the logits divided by the temperature, in float32 (float64 for float64 inputs).
    """
    hidden_TD = hidden_TD.to(weight_VD.dtype)
    if weight_VD.dtype in _HALF and not weight_VD.is_cuda:
        # Only on the GPU does a product of half-precision numbers come out in full precision.
        hidden_TD, weight_VD = hidden_TD.float(), weight_VD.float()
    if chunk_tokens is None:
        chunk_bytes = _CHUNK_BYTES.get(hidden_TD.device.type, _CHUNK_BYTES["cpu"])
        chunk_tokens = max(1, chunk_bytes // (4 * len(weight_VD)))
    logprobs_T, entropies_T = _TokenLogprobs.apply(
        hidden_TD, weight_VD, bias_V, targets_T, temperature, chunk_tokens, with_entropy
    )
    return logprobs_T, entropies_T


class _TokenLogprobs(torch.autograd.Function):
    """The function, and its gradient."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The values, chunk by chunk."""
        exact = torch.float64 if hidden_TD.dtype == torch.float64 else torch.float32
        logprobs_T = hidden_TD.new_empty(len(targets_T), dtype=exact)
        sums_T = torch.empty_like(logprobs_T)
        entropies_T = torch.empty_like(logprobs_T) if with_entropy else None
        for start in range(0, len(targets_T), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits_CV = _logits(hidden_TD[chunk], weight_VD, bias_V, temperature=temperature)
            targets_C1 = targets_T[chunk, None]
            logprobs_CV = torch.log_softmax(logits_CV, dim=1)
            logprobs_C1 = logprobs_CV.gather(1, targets_C1)
            logprobs_T[chunk] = logprobs_C1[:, 0]
            sums_T[chunk] = (logits_CV.gather(1, targets_C1) - logprobs_C1)[:, 0]
            if entropies_T is not None:
                # The logits are not needed any more, so their memory takes the probabilities.
                torch.exp(logprobs_CV, out=logits_CV)
                entropies_T[chunk] = -torch.linalg.vecdot(logits_CV, logprobs_CV)
        ctx.save_for_backward(
            hidden_TD, weight_VD, bias_V, targets_T, logprobs_T, sums_T, entropies_T
        )
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        return logprobs_T, entropies_T

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_logprobs_T: Tensor | None,
        grad_entropies_T: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """The gradients of hidden states, weight and bias, chunk by chunk."""
        hidden_TD, weight_VD, bias_V, targets_T, logprobs_T, sums_T, entropies_T = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_TD = torch.empty_like(hidden_TD) if needs_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=sums_T.dtype) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=sums_T.dtype) if needs_bias else None
        if grad_logprobs_T is None:
            grad_logprobs_T = torch.zeros_like(sums_T)
        for start in range(0, len(targets_T), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            hidden_CD, targets_C1 = hidden_TD[chunk], targets_T[chunk, None]
            logits_CV = _logits(hidden_CD, weight_VD, bias_V, temperature=ctx.temperature)
            logits_CV.sub_(sums_T[chunk, None])
            if grad_entropies_T is None:
                factors_C1 = grad_logprobs_T[chunk, None] / -ctx.temperature
                grads_CV = _exp(logits_CV, dtype=weight_VD.dtype)
                lacking_C1 = torch.expm1(logprobs_T[chunk, None])
                grads_CV.scatter_(1, targets_C1, lacking_C1.to(grads_CV.dtype))
            else:
                factors_C1 = torch.full_like(sums_T[chunk, None], 1 / ctx.temperature)
                grads_CV = _with_entropy(
                    logits_CV,
                    targets_C1,
                    grad_logprobs_C1=grad_logprobs_T[chunk, None],
                    grad_entropies_C1=grad_entropies_T[chunk, None],
                    entropies_C1=entropies_T[chunk, None],
                ).to(weight_VD.dtype)
            if grad_hidden_TD is not None:
                grad_hidden_TD[chunk] = torch.mm(grads_CV, weight_VD) * factors_C1
            if grad_weight_VD is not None:
                scaled_CD = (hidden_CD * factors_C1).to(weight_VD.dtype)
                _add_product(grad_weight_VD, grads_CV.T, scaled_CD)
            if grad_bias_V is not None:
                grad_bias_V.add_(torch.mv(grads_CV.T, factors_C1[:, 0].to(grads_CV.dtype)))
        return (
            grad_hidden_TD,
            None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            *(None,) * 4,
        )


def _logits(
    hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, *, temperature: float
) -> Tensor:
    """The logits of a chunk, divided by the temperature, at least in float32."""
    if weight_VD.dtype in _HALF:
        logits_CV = torch.mm(hidden_CD, weight_VD.T, out_dtype=torch.float32)
    else:
        logits_CV = torch.mm(hidden_CD, weight_VD.T)
    if bias_V is not None:
        logits_CV.add_(bias_V)
    return logits_CV if temperature == 1 else logits_CV.div_(temperature)


def _exp(logprobs_CV: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The probabilities in this precision, in one go over the chunk."""
    if logprobs_CV.dtype == dtype:
        return logprobs_CV.exp_()
    return torch.exp(logprobs_CV, out=torch.empty_like(logprobs_CV, dtype=dtype))


def _with_entropy(
    logprobs_CV: Tensor,
    targets_C1: Tensor,
    *,
    grad_logprobs_C1: Tensor,
    grad_entropies_C1: Tensor,
    entropies_C1: Tensor,
) -> Tensor:
    """The gradient of the logits times the temperature, where the entropy has one too."""
    probabilities_CV = logprobs_CV.exp()
    inner_CV = logprobs_CV.add_(entropies_C1).mul_(grad_entropies_C1).add_(grad_logprobs_C1)
    grads_CV = inner_CV.mul_(probabilities_CV).neg_()
    return grads_CV.scatter_add_(1, targets_C1, grad_logprobs_C1)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the matrix product to the total, in the precision of the total."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right, out_dtype=total.dtype))
