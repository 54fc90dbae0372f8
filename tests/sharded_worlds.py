"""Small worlds for the sharded trainer: processes that wait for work, and the work they do.

The processes are started once and meet over gloo; a piece of work is a function of this module,
called with the ranks by all of them at the same time. Answers are made by each process itself.
"""

import math
import multiprocessing
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from native_worlds import tiny_model
from sortedrl.config.train import TrainSettings
from sortedrl.errors import CheckpointError, ModelError, TrainingError
from sortedrl.models.loading import load_model, model_without_weights
from sortedrl.training.attention import checkpoint_layers
from sortedrl.training.fsdp.checkpoint import (
    export_whole,
    read_full,
    read_sharded,
    write_full,
    write_sharded,
)
from sortedrl.training.fsdp.model import engine_tensors, rows_of
from sortedrl.training.fsdp.ranks import open_ranks
from sortedrl.training.fsdp.trainer import sharded_trainer
from sortedrl.training.lora import add_adapters
from sortedrl.types import TrainBatch
from training_worlds import trainer_of, written

_SECONDS = 300


class Pair:
    """Two processes, the ranks of one world."""

    def __init__(self, folder, *, world=2):
        context = multiprocessing.get_context("spawn")
        self._ends, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, f"file://{folder}/meeting", rank, world), daemon=True
            )
            process.start()
            self._ends.append(ours)
            self._processes.append(process)

    def do(self, work, *arguments):
        """What the work gives on each rank; an error on any of them is raised here."""
        for end in self._ends:
            end.send((work, arguments))
        found = []
        for rank, end in enumerate(self._ends):
            assert end.poll(_SECONDS), f"rank {rank} did not answer: a rank waits for another"
            is_well, result = end.recv()
            assert is_well, f"rank {rank}: {result}"
            found.append(result)
        return found

    def close(self):
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join(_SECONDS)
            process.kill()


def _serve(end, meeting, rank, world):
    ranks = open_ranks(meeting, rank=rank, world=world, timeout_seconds=_SECONDS)
    while (asked := end.recv()) is not None:
        work, arguments = asked
        try:
            end.send((True, work(ranks, *arguments)))
        except Exception:  # noqa: BLE001 (whatever it is, the test must hear of it)
            end.send((False, traceback.format_exc()))
    ranks.close()


class Silent:
    """A tokenizer without files."""

    def save_pretrained(self, folder):
        """Nothing to save."""


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and the answers of each update by their lengths."""

    settings: TrainSettings
    lengths: tuple[int, ...] = (5, 9, 24, 3, 12, 7, 1, 18)
    architecture: str = "llama"
    dtype: torch.dtype = torch.float32
    is_checkpointed: bool = False
    source: str | Path | None = None
    """Where ranks read their part of the models; by default each of them makes them whole."""

    @property
    def has_adapters(self):
        return self.settings.lora.rank is not None

    def model(self):
        """The model that every process begins with."""
        model = tiny_model(self.architecture, std=0.3)
        # Its buffers stay in fp32, as in a model that is read from files.
        for weight in model.parameters():
            weight.data = weight.data.to(self.dtype)
        return self.prepared(model)

    def prepared(self, model):
        """With adapters or checkpointed layers."""
        if self.has_adapters:
            add_adapters(model, self.settings.lora, seed=0)
        if self.is_checkpointed:
            checkpoint_layers(model)
            model.train()
        return model

    def batch(self, update):
        """Answers to the first model, two to a prompt: stale after the first update."""
        model = tiny_model(self.architecture, std=0.3)
        return TrainBatch(update, tuple(written(model, self.lengths, samples=2, seed=update)))

    def sharded(self, ranks):
        """The trainer of a rank."""
        algorithm = self.settings.algorithm

        def empty():
            return model_without_weights(self.source, dtype=self.dtype)

        def other():
            return tiny_model(std=0.3) if self.source is None else empty()

        return sharded_trainer(
            self.model() if self.source is None else self.prepared(empty()),
            ranks,
            settings=self.settings.update,
            temperature=self.settings.rollout.temperature,
            first=other() if algorithm.kl_coef > 0 and not self.has_adapters else None,
            critic=other() if algorithm.has_critic else None,
            source=self.source,
            first_source=self.source,
        )

    def alone(self):
        """The trainer of one process, and its model."""
        model = self.model()
        return trainer_of(model, self.settings), model


@dataclass(frozen=True)
class Outcome:
    """What updates leave behind, whole."""

    weights: dict
    values: dict
    """The critic's."""
    version: int
    numbers: dict


def outcome(trainer):
    """Of a sharded trainer."""
    weights = {}
    for bucket in trainer.buckets(max_bytes=20_000):
        weights.update((name, tensor.clone()) for name, tensor in bucket)
    critic, values = trainer.trainer.critic, {}
    if critic is not None:
        values = {name: part.full_tensor() for name, part in critic.critic.tensors().items()}
    return Outcome(weights, values, trainer.version, dict(trainer.last))


def outcome_alone(trainer, model):
    """Of the trainer of one process."""
    values = {} if trainer.critic is None else trainer.critic.critic.tensors()
    weights = {name: tensor.detach() for name, tensor in engine_tensors(model).items()}
    return Outcome(weights, values, trainer.version, dict(trainer.last))


def updated(ranks, case, updates=2):
    """The outcome of so many updates."""
    trainer = case.sharded(ranks)
    for update in range(updates):
        trainer.update(case.batch(update))
    return outcome(trainer)


def updated_alone(case, updates=2):
    """The same in one process."""
    trainer, model = case.alone()
    for update in range(updates):
        trainer.update(case.batch(update))
    return outcome_alone(trainer, model)


def poisoned(ranks, case):
    """An answer of which the model says no numbers: what the update made of it, and the next.

    Only the rank that goes through the answer meets them.
    """
    trainer = case.sharded(ranks)
    batch = case.batch(0)
    first, *others = [{*t.prompt.tokens, *t.tokens[:-1]} for t in batch.trajectories]
    token = min(first - set().union(*others))
    before = outcome(trainer)
    with spoilt_row(trainer, token):
        trainer.update(batch)
    after = outcome(trainer)
    trainer.update(batch)
    return before, after, outcome(trainer)


@contextmanager
def spoilt_row(trainer, row):
    """The embedding of a token is no number meanwhile; one rank has it."""
    weight = trainer.model.get_input_embeddings().weight
    ranks = trainer.ranks
    start, stop = rows_of(len(weight), rank=ranks.rank, world=ranks.world)
    own = weight.to_local().detach()[row - start : row - start + 1 if start <= row < stop else 0]
    kept = own.clone()
    own.fill_(math.nan)
    yield
    own.copy_(kept)


def broken_is_refused(ranks, case, folder):
    """What each rank says when weights that are not finite on one of them are to be saved."""
    trainer = case.sharded(ranks)
    said = []
    with spoilt_row(trainer, 100):
        for write in (write_full, write_sharded):
            try:
                write(trainer, folder, tokenizer=Silent())
            except CheckpointError as error:
                said.append(str(error))
    return said, list(folder.rglob("*"))


def blown_up(ranks, case):
    """The last rank's part of one gradient is infinite: what came of the step."""
    trainer = case.sharded(ranks)
    optimiser = trainer.trainer.optimiser
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if ranks.rank == ranks.world - 1:
        next(trainer.model.parameters()).grad.to_local().fill_(math.inf)
    return optimiser.step(), optimiser.num_steps


def given_different_batches(ranks, case):
    """What a rank says when it is given another batch than the others."""
    trainer = case.sharded(ranks)
    try:
        trainer.update(case.batch(ranks.rank))
    except TrainingError as error:
        return str(error)
    return None


def saved(ranks, case, folder, kind):
    """Write a checkpoint after one update, then make another; counters and outcome."""
    trainer = case.sharded(ranks)
    trainer.update(case.batch(0))
    write = {"full": write_full, "sharded": write_sharded}[kind]
    counters = write(trainer, folder, tokenizer=Silent())
    trainer.update(case.batch(1))
    return counters, outcome(trainer)


def resumed(ranks, case, folder, kind, counters):
    """Go on from a checkpoint after one update, and make another."""
    trainer = case.sharded(ranks)
    if kind == "full" and not case.has_adapters:
        # As a run does it: the model is loaded first, and then spread.
        model = case.model()
        loaded = type(model).from_pretrained(folder / "model", dtype=case.dtype)
        trainer = replace_model(case, loaded).sharded(ranks)
    read = {"full": read_full, "sharded": read_sharded}[kind]
    read(trainer, folder, counters=counters)
    trainer.update(case.batch(1))
    return outcome(trainer)


def exported(ranks, case, folder, file_bytes):
    """Write the model after an update, in files of so many bytes."""
    trainer = case.sharded(ranks)
    trainer.update(case.batch(0))
    export_whole(trainer, folder, tokenizer=Silent(), file_bytes=file_bytes)


def unreadable(ranks, case, source):
    """What each rank says of a model that cannot be read."""
    try:
        replace(case, source=source).sharded(ranks)
    except ModelError as error:
        return str(error)
    return None


def read(ranks, case, source):
    """What ranks make of a batch that read their part of the models, and that load all of it."""
    loaded = load_model(source, dtype=case.dtype, device="cpu")
    found = []
    for trainer in (
        replace(case, source=source).sharded(ranks),
        replace_model(case, case.prepared(loaded)).sharded(ranks),
    ):
        begun = outcome(trainer)
        trainer.update(case.batch(0))
        found += [begun, outcome(trainer)]
    return found


def replace_model(case, model):
    """The case with a model that is there already."""

    class Loaded(Case):
        def model(self):
            return model

    return Loaded(**vars(case))


def unwritable(ranks, case, folder):
    """Fail to write a checkpoint, then go on; what each rank said."""
    trainer = case.sharded(ranks)
    said = []
    for write in (write_full, write_sharded):
        try:
            write(trainer, folder / "under-a-file", tokenizer=Silent())
        except Exception as error:  # noqa: BLE001 (libraries raise kinds of their own)
            said.append(str(error))
    trainer.update(case.batch(0))
    return said, trainer.version


def held(ranks, case):
    """How many numbers this rank holds of each model between calls, and how many there are."""
    trainer = sharded_trainer(
        case.model(),
        ranks,
        settings=case.settings.update,
        temperature=case.settings.rollout.temperature,
        first=(first := tiny_model(std=0.3)),
        critic=(critic := tiny_model(std=0.3)),
    )
    trainer.update(case.batch(0))
    trainer.logprobs(case.batch(0).trajectories)
    return [
        (sum(p.to_local().numel() for p in model.parameters()), model.num_parameters())
        for model in (trainer.model, first, critic)
    ]


def bucket_sizes(ranks, case, max_bytes):
    """For each bucket, the bytes of its tensors by name."""
    trainer = case.sharded(ranks)
    return [
        {name: tensor.nbytes for name, tensor in bucket}
        for bucket in trainer.buckets(max_bytes=max_bytes)
    ]
