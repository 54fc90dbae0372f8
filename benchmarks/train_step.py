"""Time and memory of one update: packed, compared with padded micro-batches.

    python benchmarks/train_step.py                                   a small model on the CPU
    python benchmarks/train_step.py --device cuda --json step.json    two shapes on a GPU
    python benchmarks/train_step.py --device cuda --checkpointing --model qwen2.5-0.5b

One update is the forward and backward passes over all trajectories with accumulated gradients, and
one step of AdamW. All variants alternate on the same model and trajectories of long-tailed lengths:

    packed          ours: packs of at most `budget` tokens, log-probabilities in chunks,
                    layers compiled on a GPU
    padded          micro-batches in the given order, padded to the longest trajectory;
                    model(...).logits, log_softmax, gather. Sized to fill the same budget if
                    all are as long as the longest
    padded, best    the same, with the fastest of several micro-batch sizes
    padded, sorted  the same after sorting by length, again the fastest of several sizes
    one by one      a single trajectory at a time, hence without padding (CPU only)

Tokens are those of the trajectories, prompts and answers, never padding. On the CPU, the processor
time of one thread is measured, which other processes do not affect.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import tyro

if TYPE_CHECKING:
    from rich.progress import Progress
    from torch.optim import Optimizer
    from transformers import PreTrainedModel

    from sortedrl.training.batch import TokenSequence

ModelName = Literal["small", "smollm2-135m", "qwen2.5-0.5b"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to compare."""

    device: Literal["cpu", "cuda"] = "cpu"
    """float32 on the CPU, bfloat16 on the GPU."""
    model: tuple[ModelName, ...] = ()
    """Shapes with random weights; by default small on the CPU, the other two on the GPU."""
    trajectories: int | None = None
    """Trajectories of the update; by default 48 on the CPU, 128 on the GPU."""
    mean: int | None = None
    """Mean length of the answers, lognormal; by default 64 and 300."""
    max: int | None = None
    """Maximum length of the answers; by default 448 and 2,048."""
    prompt_tokens: tuple[int, int] = (16, 64)
    """Shortest and longest prompt."""
    budget: int | None = None
    """Tokens of a pack; by default 4,096 and 16,896: eight of the longest trajectories."""
    checkpointing: bool = False
    """Gradient checkpointing, in all variants."""
    repeats: int = 3
    """Timed updates of each variant."""
    seed: int = 0
    """Seed of weights, tokens and lengths."""
    json: Path | None = None
    """Write everything to this file."""

    def resolved(self) -> Settings:
        """Fill in the defaults of the device."""
        on_gpu = self.device == "cuda"
        most = self.max or (2048 if on_gpu else 448)
        return replace(
            self,
            model=self.model or (("smollm2-135m", "qwen2.5-0.5b") if on_gpu else ("small",)),
            trajectories=self.trajectories or (128 if on_gpu else 48),
            mean=self.mean or (300 if on_gpu else 64),
            max=most,
            budget=self.budget or 8 * (most + self.prompt_tokens[1]),
        )


@dataclass(slots=True)
class Way:
    """One variant of the update, and its measurements."""

    name: str
    update: Callable[[], float]
    num_batches: int
    batch_size: int | None = None
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    loss: float | None = None

    def facts(self, tokens: int, *, beside: Way) -> dict[str, Any]:
        """For the JSON file."""
        ratios = [theirs / ours for ours, theirs in zip(beside.seconds, self.seconds, strict=True)]
        return {
            "name": self.name,
            "batches": self.num_batches,
            "batch_size": self.batch_size,
            "seconds": self.seconds,
            "tokens_per_second": tokens / median(self.seconds),
            "packed_is_faster_by": median(ratios),
            "ratios": ratios,
            "peak_bytes": self.peak_bytes,
            "loss": self.loss,
        }


def make_model(name: ModelName, settings: Settings) -> PreTrainedModel:
    """The shape with random weights, ready for training."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from engine_peers.models import NO_SPECIAL_TOKENS, SHAPES
    from sortedrl.training.attention import checkpoint_layers

    shapes = {
        "small": SHAPES["llama-5m"],
        "smollm2-135m": SHAPES["smollm2-135m"],
        "qwen2.5-0.5b": Qwen2Config(
            hidden_size=896,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            intermediate_size=4864,
            vocab_size=151936,
            max_position_embeddings=32768,
            **NO_SPECIAL_TOKENS,
        ),
    }
    torch.manual_seed(settings.seed)
    auto: Any = AutoModelForCausalLM
    with torch.device(settings.device):
        dtype = torch.bfloat16 if settings.device == "cuda" else torch.float32
        model: PreTrainedModel = auto.from_config(
            shapes[name], dtype=dtype, attn_implementation="sdpa"
        )
    model.train()
    if settings.checkpointing:
        checkpoint_layers(model)
    return model


def draw(settings: Settings, *, vocabulary: int) -> list[TokenSequence]:
    """Trajectories of long-tailed lengths, from a seed."""
    from engine_peers.drawing import long_tail
    from sortedrl.training.batch import TokenSequence

    source = Random(settings.seed)
    lengths = long_tail(
        settings.trajectories or 0,
        mean_length=settings.mean or 0,
        most=settings.max or 0,
        source=source,
    )

    def tokens(count: int) -> list[int]:
        return [source.randrange(vocabulary) for _ in range(count)]

    return [
        TokenSequence(tokens(source.randint(*settings.prompt_tokens)), tokens(length))
        for length in lengths
    ]


def advantages(sequences: Sequence[TokenSequence]) -> list[float]:
    """The advantage of each trajectory's tokens."""
    total = sum(len(sequence.answer) for sequence in sequences)
    return [(-1 if number % 3 else 2) / total for number in range(len(sequences))]


def packed_way(
    model: PreTrainedModel,
    optimiser: Optimizer,
    sequences: Sequence[TokenSequence],
    *,
    budget: int,
) -> Way:
    """Ours."""
    import torch

    from sortedrl.training.batch import packs
    from sortedrl.training.forward import PackedModel

    packed = PackedModel(model, is_compiled=model.device.type == "cuda")
    weights = advantages(sequences)
    cut = packs([sequence.num_rows for sequence in sequences], budget=budget)

    def update() -> float:
        total = torch.zeros((), device=model.device)
        for pack in cut:
            chosen = [sequences[index] for index in pack.indices]
            sizes = torch.tensor([len(sequence.answer) for sequence in chosen])
            weights_T = torch.tensor([weights[index] for index in pack.indices])
            weights_T = weights_T.repeat_interleave(sizes).to(model.device)
            loss = -(packed.logprobs(chosen).logprobs_T * weights_T).sum()
            loss.backward()
            total += loss.detach()
        optimiser.step()
        optimiser.zero_grad()
        return total.item()

    return Way("packed", update, num_batches=len(cut))


def padded_way(
    model: PreTrainedModel,
    optimiser: Optimizer,
    sequences: Sequence[TokenSequence],
    *,
    name: str,
    size: int,
    is_sorted: bool = False,
) -> Way:
    """The padded variant, in micro-batches of this many trajectories."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    weights = advantages(sequences)
    order = list(range(len(sequences)))
    if is_sorted:
        order.sort(key=lambda index: -sequences[index].num_rows)
    batches = [order[start : start + size] for start in range(0, len(order), size)]

    def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
        tensors = [torch.tensor(row, dtype=dtype) for row in rows]
        return pad_sequence(tensors, batch_first=True).to(model.device)

    def batch_loss(batch: Sequence[int]) -> torch.Tensor:
        chosen = [sequences[index] for index in batch]
        rows = [[*sequence.prompt, *sequence.answer] for sequence in chosen]
        ids_BL = padded(rows, torch.long)
        mask_BL = padded([[1] * len(row) for row in rows], torch.long)
        counts = [
            [0.0] * (len(sequence.prompt) - 1) + [weights[index]] * len(sequence.answer)
            for index, sequence in zip(batch, chosen, strict=True)
        ]
        weights_BL = padded(counts, torch.float32)
        output: Any = model(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False)
        logprobs_BLV = output.logits[:, :-1].log_softmax(-1, dtype=torch.float32)
        logprobs_BL = logprobs_BLV.gather(-1, ids_BL[:, 1:, None])[..., 0]
        loss: torch.Tensor = -(logprobs_BL * weights_BL).sum()
        return loss

    def update() -> float:
        total = torch.zeros((), device=model.device)
        for batch in batches:
            loss = batch_loss(batch)
            loss.backward()
            total += loss.detach()
        optimiser.step()
        optimiser.zero_grad()
        return total.item()

    return Way(name, update, num_batches=len(batches), batch_size=size)


def timed(way: Way, device: str) -> float | None:
    """Seconds of one update; `None` if out of memory."""
    import torch

    on_gpu = device == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    clock = time.perf_counter if on_gpu else time.process_time
    began = clock()
    try:
        way.loss = way.update()
    except torch.cuda.OutOfMemoryError:
        return None
    if on_gpu:
        torch.cuda.synchronize()
        way.peak_bytes = torch.cuda.max_memory_allocated()
    return clock() - began


def fastest(ways: Sequence[Way], device: str, say: Callable[[str], None]) -> Way:
    """The fastest micro-batch size of the padded variant."""
    tried: list[tuple[float, Way]] = []
    for way in ways:
        say(f"{way.name}: trying micro-batches of {way.batch_size}")
        seconds = timed(way, device)
        if seconds is not None:
            tried.append((seconds, way))
    if not tried:
        raise SystemExit(f"{ways[0].name}: no micro-batch fits into the memory; lower --budget")
    return min(tried, key=lambda pair: pair[0])[1]


def compare(shape: ModelName, settings: Settings, progress: Progress) -> dict[str, Any]:
    """All variants on one model, alternating."""
    import torch

    assert settings.budget, "settings are resolved"
    task = progress.add_task(f"{shape}: building", total=settings.repeats)

    def say(text: str) -> None:
        progress.update(task, description=f"{shape}: {text}")

    model = make_model(shape, settings)
    sequences = draw(settings, vocabulary=model.config.vocab_size)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=1e-6, fused=settings.device == "cuda" or None
    )
    say("packed: warming up")
    ours = packed_way(model, optimiser, sequences, budget=settings.budget)
    timed(ours, settings.device)
    longest = max(sequence.num_rows + 1 for sequence in sequences)
    fitting = max(2, settings.budget // longest)

    def padded(name: str, *, size: int, is_sorted: bool = False) -> Way:
        return padded_way(model, optimiser, sequences, name=name, size=size, is_sorted=is_sorted)

    ways = [ours]
    others = [("padded", fitting)]
    if settings.device == "cpu":
        others.append(("one by one", 1))  # on a GPU it would take minutes
    for name, size in others:
        ways.append(fastest([padded(name, size=size)], settings.device, say))
    for name, is_sorted in (("padded, best", False), ("padded, sorted", True)):
        sizes = {max(2, fitting // 4), max(2, fitting // 2), fitting}
        if settings.device == "cuda":
            # Small passes are slow on a GPU; on the CPU they only save padding.
            sizes.add(2 * fitting)
        tried = [padded(name, size=size, is_sorted=is_sorted) for size in sorted(sizes)]
        ways.append(fastest(tried, settings.device, say))
    for _ in range(settings.repeats):
        for way in ways:
            say(way.name)
            seconds = timed(way, settings.device)
            assert seconds is not None, "it fitted before"
            way.seconds.append(seconds)
        progress.advance(task)
    tokens = sum(sequence.num_rows + 1 for sequence in sequences)
    return {
        "model": shape,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocabulary": model.config.vocab_size,
        "tokens": tokens,
        "answer_tokens": sum(len(sequence.answer) for sequence in sequences),
        "longest": longest,
        "fill": tokens / (ours.num_batches * settings.budget),
        "ways": [way.facts(tokens, beside=ours) for way in ways],
    }


def show(result: dict[str, Any]) -> None:
    """Print the table of one model."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=SIMPLE,
        pad_edge=False,
        title=f"{result['model']}: {result['tokens']:,} tokens, packs {result['fill']:.0%} full",
        title_justify="left",
    )
    headings = ("way", "batches", "tokens/s", "packed x", "spread", "peak GiB", "x")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "way" else "right", no_wrap=True)
    least = result["ways"][0]["peak_bytes"]
    for way in result["ways"]:
        ratios, peak = way["ratios"], way["peak_bytes"]
        size = "" if way["batch_size"] is None else f" of {way['batch_size']}"
        table.add_row(
            way["name"],
            f"{way['batches']}{size}",
            f"{way['tokens_per_second']:,.0f}",
            f"{way['packed_is_faster_by']:.2f}",
            f"{min(ratios):.2f}-{max(ratios):.2f}",
            "-" if peak is None else f"{peak / 2**30:.2f}",
            "-" if peak is None else f"{peak / least:.2f}",
        )
    Console().print(table)
    print("packed x: speedup of packed, median and spread over the updates")
    if least is None:
        print("peak memory is measured on GPUs only")


def main() -> None:
    """Measure and print."""
    settings = tyro.cli(Settings, description=__doc__).resolved()
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from engine_peers.drawing import described
    from engine_peers.peer import Workload
    from provenance import provenance

    torch.set_num_threads(1)
    results = []
    for name in settings.model:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            results.append(compare(name, settings, progress))
        show(results[-1])
        gc.collect()
    if settings.json is not None:
        sequences = draw(settings, vocabulary=1000)
        workload = Workload(
            prompts=[sequence.prompt for sequence in sequences],
            lengths=[len(sequence.answer) for sequence in sequences],
            slots=len(sequences),
            device=settings.device,
            dtype="bfloat16" if settings.device == "cuda" else "float32",
            threads=1,
        )
        facts = provenance(settings.device) | {
            "settings": asdict(settings),
            "workload": described(workload),
        }
        facts["results"] = results
        settings.json.write_text(json.dumps(facts, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
