"""A supervised run: trains on given responses, and writes a warm-started model.

Every row comes once per epoch, in an order fixed by the seed; a step takes rows until it has its
tokens. The micro-batches are those of an update: packed, without padding.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from sortedrl.config.parsing import settings_to_toml
from sortedrl.config.train import SupervisedSettings
from sortedrl.core.files import MetricsFile
from sortedrl.core.randomness import mix
from sortedrl.data.catalogue import Task
from sortedrl.data.rows import Row
from sortedrl.data.stream import TokenizedRow, Tokenizer, tokenized
from sortedrl.errors import DataError, TrainingError
from sortedrl.models.shape import shape_of
from sortedrl.report.terminal import Advance, thousands
from sortedrl.runs.build_training import ModelSettings, trained_model
from sortedrl.runs.folder import RunFolder
from sortedrl.runs.output import duration
from sortedrl.runs.start import Stopping
from sortedrl.runs.tasks import tokenizer_of
from sortedrl.training.batch import TokenSequence, packs
from sortedrl.training.checkpoint import write_model
from sortedrl.training.forward import PackedModel
from sortedrl.training.lora import export_model, trained_parameters
from sortedrl.training.optimiser import Optimiser


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedStep:
    """The metrics of one step."""

    step: int
    epoch: int
    loss: float
    """Mean negative log-likelihood of an answer token, before the step."""
    grad_norm: float
    learning_rate: float
    answer_tokens: int
    tokens: int
    """Prompts included."""
    seconds: float


def step_rows(
    lengths: Sequence[int], *, batch_tokens: int, epochs: int, seed: int
) -> list[list[int]]:
    """The rows of each step: all rows in every epoch, each step with at least its tokens.

    Only the last step may have fewer.
    """
    steps: list[list[int]] = [[]]
    room = batch_tokens
    for epoch in range(epochs):
        for row in sorted(range(len(lengths)), key=lambda row: mix(seed, epoch, row)):
            if room <= 0:
                steps.append([])
                room = batch_tokens
            steps[-1].append(row)
            room -= lengths[row]
    return steps


def supervised_steps(
    policy: PackedModel,
    optimiser: Optimiser,
    sequences: Sequence[TokenSequence],
    *,
    rows: Sequence[Sequence[int]],
    micro_batch_tokens: int,
    max_bad: int,
) -> Iterator[SupervisedStep]:
    """Train step by step; the weights are consistent whenever a step is yielded."""
    num_rows = num_bad = 0
    for number, chosen in enumerate(rows):
        began = time.perf_counter()
        of_step = [sequences[row] for row in chosen]
        answer_tokens = sum(len(sequence.scored_places) for sequence in of_step)
        lengths = [sequence.num_rows for sequence in of_step]
        is_to_repeat = True
        while is_to_repeat:
            total = torch.zeros((), device=policy.model.device)
            for pack in packs(lengths, budget=micro_batch_tokens):
                found = policy.logprobs([of_step[index] for index in pack.indices])
                part = -found.logprobs_T.sum() / answer_tokens
                optimiser.backward(part)
                total += part.detach()
            result = optimiser.step(loss=float(total))
            is_to_repeat = result.is_to_repeat
        num_bad = 0 if result.is_applied else num_bad + 1
        if num_bad >= max_bad:
            raise TrainingError(
                f"{max_bad} steps in a row had a loss or a gradient that is not finite; they were "
                "skipped. Lower optimiser.learning_rate"
            )
        num_rows += len(chosen)
        yield SupervisedStep(
            step=number + 1,
            epoch=(num_rows - 1) // len(sequences),
            loss=float(total),
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            answer_tokens=answer_tokens,
            tokens=sum(lengths),
            seconds=time.perf_counter() - began,
        )


_LINE_EVERY = 50
_FEW_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedEnding:
    """How a supervised run ended."""

    steps: int
    is_complete: bool
    """Whether it was not stopped before its end."""
    loss: float
    """Mean over the last tenth of the steps, at most 50."""
    answer_tokens: int
    seconds: float


def supervised_run(
    settings: SupervisedSettings,
    task: Task,
    *,
    stopping: Stopping,
    advance: Advance,
    tell: Callable[[str], None],
) -> SupervisedEnding:
    """Train on the responses of a task's rows, and leave the model in the run's folder."""
    folder = RunFolder(settings.out)
    folder.refuse_second_run(can_resume=False)
    tokenizer = tokenizer_of(settings.model)
    sequences = _sequences(task, tokenizer, settings, tell=tell)
    rows = step_rows(
        [sequence.num_rows for sequence in sequences],
        batch_tokens=settings.batch_tokens,
        epochs=settings.epochs,
        seed=settings.seed,
    )[: settings.max_steps]
    num_tokens = sum(sequence.num_rows for sequence in sequences)
    if settings.max_steps is None and num_tokens < _FEW_STEPS * settings.batch_tokens:
        tell(
            f"{len(sequences):,} rows with {num_tokens:,} tokens; a step takes batch_tokens = "
            f"{settings.batch_tokens:,}, so there will be {len(rows)} in all (lower it for more)"
        )
    model = trained_model(ModelSettings.of(settings))
    optimiser = Optimiser(
        trained_parameters(model),
        settings.optimiser,
        total_steps=len(rows),
        computes_in=model.dtype,
    )
    _refuse_no_room(settings.out, model)
    policy = PackedModel(model, is_compiled=settings.passes.compiles_on(model.device.type))
    done: list[SupervisedStep] = []
    with ExitStack() as stack:
        stack.enter_context(folder.left_as_found())
        stack.enter_context(folder.created(settings_to_toml(settings, SupervisedSettings())))
        metrics = stack.enter_context(closing(MetricsFile(folder.metrics)))
        for step in supervised_steps(
            policy,
            optimiser,
            sequences,
            rows=rows,
            micro_batch_tokens=settings.passes.micro_batch_tokens,
            max_bad=settings.optimiser.max_bad_updates,
        ):
            done.append(step)
            metrics(asdict(step))
            line = _line(done, len(rows))
            advance(line, step.step / len(rows))
            if step.step % _LINE_EVERY == 0 or step.step == len(rows):
                tell(line)
            if stopping.is_requested:
                break
        write_model(
            folder.model,
            lambda place: export_model(model, tokenizer, place),
            otherwise="supervised training keeps no checkpoints, so it must be run again: free "
            "some space, and choose another folder (--out)",
        )
    return SupervisedEnding(
        steps=len(done),
        is_complete=len(done) == len(rows),
        loss=_recent_loss(done),
        answer_tokens=sum(step.answer_tokens for step in done),
        seconds=sum(step.seconds for step in done),
    )


def _refuse_no_room(out: Path, model: PreTrainedModel) -> None:
    """Refuse a disk without space for the model, before anything is trained."""
    size = sum(weight.nbytes for weight in model.parameters())
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < size:
        raise DataError(
            out,
            f"must have room for the trained model of {size / 2**20:,.0f} MiB, and its disk has "
            f"{free / 2**20:,.0f} MiB free; free space there, or choose another folder (--out)",
        )


def _sequences(
    task: Task, tokenizer: Tokenizer, settings: SupervisedSettings, *, tell: Callable[[str], None]
) -> list[TokenSequence]:
    """Prompts and responses that fit into the model's context together."""
    for row in task.rows:
        _refuse_without_response(row)
    found = tokenized(task.rows, tokenizer, chat=settings.data.chat)
    context = shape_of(settings.model).context
    sequences = [TokenSequence(row.tokens, _response_tokens(row, tokenizer)) for row in found.rows]
    fitting = [s for s in sequences if len(s.prompt) + len(s.answer) <= context]
    if len(fitting) < len(sequences):
        tell(
            f"{task.name}: {len(sequences) - len(fitting)} of {len(sequences)} rows are skipped: "
            f"with their responses they are longer than {context} tokens"
        )
    if not fitting:
        raise DataError(task.name, f"no row fits into the model's context of {context} tokens")
    return fitting


def _refuse_without_response(row: Row) -> None:
    response = row.fields.get("response")
    if not isinstance(response, str) or not response:
        others = ", ".join(row.fields) or "a prompt"
        got = f"{response!r:.80}" if "response" in row.fields else f"only {others}"
        raise DataError(
            row.place,
            f"supervised training needs a text in the field 'response', got {got}; give the "
            "column with the answer to imitate that name",
        )


def _response_tokens(row: TokenizedRow, tokenizer: Tokenizer) -> Sequence[int]:
    tokens = tokenizer.encode(str(row.fields["response"]), add_special_tokens=False)
    end = tokenizer.eos_token_id
    return tokens if end is None else [*tokens, end]


def _line(done: Sequence[SupervisedStep], total: int) -> str:
    recent = done[-_LINE_EVERY:]
    seconds = sum(step.seconds for step in recent)
    tokens = sum(step.tokens for step in recent)
    left = seconds / len(recent) * (total - len(done))
    return (
        f"step {len(done):4d} of {total}  loss {_recent_loss(done):.4f}  "
        f"{thousands(tokens / seconds)} tokens/s  {duration(left)} left"
    )


def _recent_loss(done: Sequence[SupervisedStep]) -> float:
    recent = done[-max(1, min(_LINE_EVERY, len(done) // 10)) :]
    return sum(step.loss for step in recent) / len(recent) if recent else math.nan
