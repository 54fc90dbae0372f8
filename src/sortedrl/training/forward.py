"""The forward pass of training: packed sequences in, log-probabilities of their answers out.

The sequences are laid end to end in one row without padding; only the positions that predict an
answer token go through the output layer. The output does not depend on how sequences were packed.

The logits are never there all at once: they are computed chunk by chunk in float32 and dropped, and
the backward pass recomputes them. With p the probabilities of a row, y its token and t the
temperature, the gradients are those of log p_y = logit_y / t - logsumexp(logits / t) and of the
entropy H = -sum p log p:

    d log p_y / d logits = (onehot_y - p) / t        dH / d logits = -p (log p + H) / t

Where only log p_y has a gradient, the factor of each row is left out of the [C, V] matrix and
multiplied into the hidden states instead, which are far smaller.

Axes: R tokens of the row, T answer tokens of all sequences, C tokens of a chunk, D hidden size,
V vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sortedrl.errors import ModelError, RequestError
from sortedrl.models.attention_interface import refuse_foreign_attention, why_not_finite
from sortedrl.training.attention import (
    INSTEAD,
    Row,
    compiled_layers,
    packed_attention,
    replaced_forwards,
)
from sortedrl.training.batch import TokenSequence

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


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The model's output for the answer tokens, answer after answer."""

    logprobs_T: Tensor
    entropies_T: Tensor | None


class PackedModel:
    """A Hugging Face causal language model that reads packed sequences.

    The model itself is left as it is. Gradient checkpointing and adapters may be switched on and
    off at any time, except on the output layer.
    """

    def __init__(
        self, model: PreTrainedModel, *, temperature: float = 1.0, is_compiled: bool = False
    ) -> None:
        """Refuse a model whose log-probabilities would be wrong.

        One without weights is not computed with: call `check` when it has them. Compiled layers
        need less time and memory on a GPU, and half a minute before the first pass.
        """
        self.model = model
        self.temperature = temperature
        self._compiled = compiled_layers(model) if is_compiled else {}
        refuse_foreign_attention(model, instead=INSTEAD)
        if model.device.type != "meta":
            self.check()

    @property
    def output_layer(self) -> nn.Linear:
        """The layer that makes the logits."""
        layer = self.model.get_output_embeddings()
        if not isinstance(layer, nn.Linear):
            raise ModelError(
                f"the output layer of {type(self.model).__name__} must be a plain linear layer, "
                f"got {type(layer).__name__}; load the model with AutoModelForCausalLM, and put no "
                "adapter on its output layer"
            )
        return layer

    def check(self) -> None:
        """Compare with the model's own forward pass; raises `ModelError` if they differ."""
        # Without compiled layers: those would be compiled for passes without gradients first, which
        # most runs never make again.
        compiled, self._compiled = self._compiled, {}
        try:
            _probe(self)
        finally:
            self._compiled = compiled

    def logprobs(
        self, sequences: Sequence[TokenSequence], *, with_entropy: bool = False
    ) -> TokenLogprobs:
        """The log-probability of every answer token, and the entropy of its distribution."""
        return TokenLogprobs(*self._inside(partial(self._logprobs, sequences, with_entropy)))

    def hidden(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """The states from which the answer tokens are predicted, `[T, D]`."""
        hidden_TD: Tensor = self._inside(partial(self._hidden, sequences))
        return hidden_TD

    def _inside(self, compute: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Compute as the model's forward: a sharded model has its weights only there."""
        with replaced_forwards({self.model: compute}):
            return self.model()

    def _logprobs(
        self, sequences: Sequence[TokenSequence], with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        layer = self.output_layer
        targets_T = _tensor(
            [sequence.answer[place] for sequence in sequences for place in sequence.scored_places],
            device=self.model.device,
        )
        return token_logprobs(
            self._hidden(sequences),
            layer.weight,
            targets_T,
            bias_V=layer.bias,
            temperature=self.temperature,
            with_entropy=with_entropy,
        )

    def _hidden(self, sequences: Sequence[TokenSequence]) -> Tensor:
        _refuse_unreadable(sequences)
        tokens: list[int] = []
        keep: list[int] = []
        for sequence in sequences:
            before_answer = len(tokens) + len(sequence.prompt) - 1
            keep += [before_answer + place for place in sequence.scored_places]
            tokens += [*sequence.prompt, *sequence.answer[:-1]]
        device = self.model.device
        row = Row.of([sequence.num_rows for sequence in sequences], device=device)
        positions_R = torch.cat([torch.arange(length) for length in row.lengths])
        with packed_attention(self.model, self._compiled):
            output: Any = self.model.base_model(
                input_ids=_tensor(tokens, device=device)[None],
                position_ids=positions_R[None].to(device),
                use_cache=False,
                row=row,
            )
        hidden_RD: Tensor = output.last_hidden_state[0]
        if len(keep) == len(hidden_RD):
            return hidden_RD
        return hidden_RD.index_select(0, _tensor(keep, device=device))


def _tensor(numbers: list[int], *, device: torch.device) -> Tensor:
    """The numbers as int64: an array is read in a tenth of the time that torch takes for a list."""
    if not numbers:  # no buffer may be empty
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.frombuffer(array("q", numbers), dtype=torch.int64).to(device)


class Reference(Protocol):
    """The policy that the run began with: the reference of the KL divergence."""

    def logprobs(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """`logprobs_T` under the first weights."""


class CopiedReference:
    """A frozen copy of the initial model, or of the trained one at its last refresh."""

    def __init__(self, model: PreTrainedModel, *, temperature: float) -> None:
        """Freeze the model, which must not be the one that is trained."""
        model.requires_grad_(False)
        self._packed = PackedModel(model, temperature=temperature)

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """`logprobs_T` under the first weights."""
        return self._packed.logprobs(sequences).logprobs_T

    def tensors(self) -> dict[str, Tensor]:
        """Its weights, by name."""
        return {name: p.detach() for name, p in self._packed.model.named_parameters()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy these weights."""
        for name, own in self.tensors().items():
            own.copy_(tensors[name])


class AdapterReference:
    """The trained model without its adapters: a reference that takes no memory."""

    def __init__(self, policy: PackedModel) -> None:
        """The policy whose adapters are trained."""
        self._policy = policy

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """`logprobs_T` under the first weights."""
        with self._without_adapters():
            return self._policy.logprobs(sequences).logprobs_T

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        adapters = [p for p in self._policy.model.parameters() if p.requires_grad]
        self._policy.model.disable_adapters()
        # peft freezes them too, and a sharded weight stays what it was in its first pass.
        for parameter in adapters:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            self._policy.model.enable_adapters()


def _refuse_unreadable(sequences: Sequence[TokenSequence]) -> None:
    if not sequences:
        raise RequestError("at least one sequence must be given to the model, got none")
    for number, sequence in enumerate(sequences):
        if not sequence.prompt or not sequence.answer:
            raise RequestError(
                "a sequence must have a token before its answer, and an answer: sequence "
                f"{number} has {len(sequence.prompt)} prompt and {len(sequence.answer)} answer "
                "tokens; begin prompts with the tokenizer's first token, and leave out empty "
                "answers"
            )


@torch.no_grad()
def _probe(packed: PackedModel) -> None:
    """Compare with the model's own forward pass on a few tokens.

    The input of the output layer must equal ours, and its output must be the model's logits: they
    are replaced by values that no model produces, so that any scaling or capping of logits shows.
    """
    layer, model = packed.output_layer, packed.model
    vocabulary = len(layer.weight)
    ramp_V = torch.linspace(-99, 99, vocabulary, device=model.device).to(layer.weight.dtype)
    entered: list[Tensor] = []

    def replace(_: nn.Module, inputs: tuple[Tensor], logits: Tensor) -> Tensor:
        entered.append(inputs[0][0])
        return ramp_V.expand_as(logits)

    texts = [[(7 * k + 3 * n) % vocabulary for k in range(5 + 2 * n)] for n in range(3)]
    was_training = [module for module in model.modules() if module.training]
    hook = layer.register_forward_hook(replace)
    try:
        for module in was_training:
            module.training = False
        same = all(
            torch.equal(
                model(input_ids=torch.tensor([text], device=model.device), use_cache=False)
                .logits[0]
                .to(ramp_V.dtype),
                ramp_V.expand(len(text), -1),
            )
            for text in texts
        )
        ours_TD = packed.hidden([TokenSequence(text[:1], [*text[1:], 0]) for text in texts])
    finally:
        hook.remove()
        for module in was_training:
            module.training = True
    name = type(model).__name__
    if not same:
        raise ModelError(
            f"{name} changes its logits after the output layer (capped or scaled), which training "
            "does not support; train another model"
        )
    theirs_TD = torch.cat(entered).float()
    if not bool(theirs_TD.isfinite().all()):
        raise ModelError(f"{name} gives hidden states that are not finite: {why_not_finite(model)}")
    gap = (ours_TD.float() - theirs_TD).norm() / theirs_TD.norm()
    allowed = 1e-3 if layer.weight.dtype == torch.float32 else 0.1
    if not gap <= allowed:
        raise ModelError(
            f"{name} does not read packed sequences as it reads them one by one: its hidden states "
            f"must agree to {allowed:g}, they differ by {gap:.2g}; train another model"
        )
