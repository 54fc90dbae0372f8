"""Exact speculation replayed on finished answers: how many drafted tokens would be accepted.

    PYTHONPATH=. python benchmarks/speculation_study.py --model MODEL.gguf --answers answers.json
    PYTHONPATH=. python benchmarks/speculation_study.py --log RUN/answers.jsonl

A drafted token is accepted if the model samples it at that position with the noise of the answer.
Speculation therefore changes no answer, and finished answers suffice for a replay: at every step a
source drafts up to k tokens, the correct prefix is accepted, and the model adds one token.

    tokens per step = tokens / steps, between 1 and k + 1

The model generates answers to the same prompts three times: the *epoch before*, with the initial
weights; the *epoch*, with weights after some updates and other noise; and the *coupled* answers,
with the new weights and the noise of the epoch before, as coupled mode produces from interrupted
ones. They are written to `--answers`, or read from there if the file exists.

Sources:

    own          the prompt and the answer itself, as far as generated
    siblings     the other answers to the prompt, as far as generated at the same step
    finished     the same, all complete, as if this answer had been interrupted and resumed last
    epoch        the complete answers to the prompt in the epoch before
    coupled      what coupled mode discarded: the old answer after the first token that changed
    aligned      the same, but the token at the same position (it has the same noise)
    all          own, siblings and epoch together

The log of a run has one answer per prompt, as text: with `--log` only the first source is replayed,
and tags and single characters count as tokens, as in the tiny model of the demo.

A source is a table that predicts the most frequent successor of the longest known context of 1 to 6
tokens.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from provenance import markdown_table, provenance

DRAFTS = (1, 2, 4, 8)
_LONGEST_CONTEXT = 6
_TAIL = 8
_PARTS = re.compile(r"<[^>]+>|.", re.DOTALL)

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to generate and replay."""

    model: Path | None = None
    """A model folder or a GGUF file; needed unless the answers exist."""
    answers: Path | None = None
    """File of the answers."""
    log: Path | None = None
    """Replay the answers.jsonl of a demo run instead."""
    arithmetic: int = 8
    """Number of arithmetic questions (experiments/questions.py)."""
    open_ended: int = 8
    """Number of general questions (coupling_study/questions.py), at most 32."""
    samples: int = 8
    """Answers per prompt."""
    max_tokens: int = 128
    """Maximum tokens of an answer."""
    learning_rate: float = 1e-5
    """Learning rate of the updates between the two epochs."""
    updates: int = 2
    """Updates between the two epochs."""
    update_batch: int = 12
    """Answers per update."""
    slots: int = 64
    """Answers generated at the same time."""
    seed: int = 0
    """Seed of all noise."""
    threads: int = 1
    """Threads of torch."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer in its three versions, and its prompt."""

    kind: str
    prompt: list[int]
    before: list[int]
    epoch: list[int]
    coupled: list[int]


class NextTokens:
    """Successor counts for every context of up to six tokens."""

    def __init__(self) -> None:
        """Start empty."""
        self._followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def see(self, tokens: Tokens, position: int) -> None:
        """Count the token at a position, after all of its contexts."""
        for size in range(1, min(_LONGEST_CONTEXT, position) + 1):
            context = tuple(tokens[position - size : position])
            self._followers[context][tokens[position]] += 1

    def after(self, tokens: Tokens) -> tuple[int, int] | None:
        """The most frequent successor of the longest known context, and that context's length."""
        for size in range(min(_LONGEST_CONTEXT, len(tokens)), 0, -1):
            followers = self._followers.get(tuple(tokens[len(tokens) - size :]))
            if followers:
                return followers.most_common(1)[0][0], size
        return None


def draft(text: Tokens, sources: Sequence[NextTokens], *, count: int) -> list[int]:
    """Up to `count` tokens, each from the source with the longest known context."""
    context = list(text[-_LONGEST_CONTEXT:])
    drafted: list[int] = []
    while len(drafted) < count:
        found = [guess for source in sources if (guess := source.after(context)) is not None]
        if not found:
            break
        token = max(found, key=lambda guess: guess[1])[0]
        drafted.append(token)
        context = [*context, token][-_LONGEST_CONTEXT:]
    return drafted


def num_right(drafted: Tokens, true: Tokens) -> int:
    """Length of the correct prefix of the draft.

    >>> num_right([5, 6, 7], [5, 6, 8, 9])
    2
    """
    for place, (guess, token) in enumerate(zip(drafted, true, strict=False)):
        if guess != token:
            return place
    return min(len(drafted), len(true))


Advance = Callable[[int], Sequence[NextTokens]]
"""The tables available after this many tokens of the answer."""


def own_source(prompt: Tokens, answer: Tokens) -> Advance:
    """The prompt and the answer, as far as generated."""
    table = NextTokens()
    text = [*prompt, *answer]
    seen = 0

    def advance(written: int) -> Sequence[NextTokens]:
        nonlocal seen
        while seen < len(prompt) + written:
            table.see(text, seen)
            seen += 1
        return [table]

    return advance


def written_so_far(prompt: Tokens, others: Sequence[Tokens]) -> Advance:
    """Other answers to the prompt that are generated in the same steps."""
    table = NextTokens()
    texts = [[*prompt, *other] for other in others]
    seen = 0

    def advance(written: int) -> Sequence[NextTokens]:
        nonlocal seen
        for place in range(len(prompt) + seen, len(prompt) + written):
            for text in texts:
                if place < len(text):
                    table.see(text, place)
        seen = written
        return [table]

    return advance


def complete(prompt: Tokens, others: Iterable[Tokens], *, skip: int = 0) -> Advance:
    """Other answers to the prompt that are complete from the start, without their first tokens."""
    table = NextTokens()
    for other in others:
        text = [*prompt, *other]
        for position in range(len(prompt) + skip, len(text)):
            table.see(text, position)
    return lambda written: [table]


def together(*sources: Advance) -> Advance:
    """Several sources; the longest context wins."""
    return lambda written: [table for source in sources for table in source(written)]


def steps_with(prompt: Tokens, answer: Tokens, source: Advance, *, count: int) -> int:
    """Steps to generate the answer with up to `count` drafted tokens each."""
    text = [*prompt, *answer]
    written = steps = 0
    while written < len(answer):
        place = len(prompt) + written
        # The last token of an answer has no successor.
        drafted = draft(text[:place], source(written), count=count)
        written += num_right(drafted, text[place : len(text) - 1]) + 1
        steps += 1
    return steps


def aligned_steps(answer: Tokens, old: Tokens, *, start: int, count: int) -> int:
    """Steps to generate the answer from `start` on, drafting old tokens at the same positions."""
    written, steps = start, 0
    while written < len(answer):
        drafted = old[written : written + count]
        written += num_right(drafted, answer[written : len(answer) - 1]) + 1
        steps += 1
    return steps


@dataclass(frozen=True, slots=True)
class Replayed:
    """One answer, or its end, with one source."""

    tokens: int
    steps: dict[int, int]
    """Steps for each number of drafted tokens."""


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens per step of one source."""

    kind: str
    source: str
    answers: int
    per_step: dict[int, float]


def replay(answers: Sequence[Answer]) -> list[Row]:
    """All sources, over all answers of a kind and over its longest eighth."""
    rows = []
    for kind in dict.fromkeys(answer.kind for answer in answers):
        every = [answer for answer in answers if answer.kind == kind]
        longest = sorted(every, key=lambda answer: -len(answer.epoch))
        rows += _rows(kind, every, every)
        rows += _rows(f"{kind}, longest eighth", longest[: max(1, len(every) // _TAIL)], every)
    return rows


def _rows(kind: str, targets: Sequence[Answer], every: Sequence[Answer]) -> list[Row]:
    found: dict[str, list[Replayed]] = defaultdict(list)
    for answer in targets:
        for name, replayed in (_replayed(answer, every) | _replayed_coupled(answer)).items():
            found[name].append(replayed)
    return [
        Row(
            kind,
            name,
            len(parts),
            {k: sum(p.tokens for p in parts) / sum(p.steps[k] for p in parts) for k in DRAFTS},
        )
        for name, parts in found.items()
    ]


def _replayed(answer: Answer, every: Sequence[Answer]) -> dict[str, Replayed]:
    """An answer of the epoch, with each source and with all of them."""
    prompt, text = answer.prompt, answer.epoch
    same = [other for other in every if other.prompt == prompt]
    siblings = [other.epoch for other in same if other is not answer]
    before = [other.before for other in same]
    # A source remembers how far it has read, so every replay needs a new one.
    sources: dict[str, Callable[[], Advance]] = {
        "own": lambda: own_source(prompt, text),
        "siblings": lambda: written_so_far(prompt, siblings),
        "finished": lambda: complete(prompt, siblings),
        "epoch": lambda: complete(prompt, before),
    }
    if not siblings and not any(before):
        del sources["siblings"], sources["finished"], sources["epoch"]
    else:
        sources["all"] = lambda: together(
            own_source(prompt, text), written_so_far(prompt, siblings), complete(prompt, before)
        )
    return {
        name: Replayed(len(text), {k: steps_with(prompt, text, source(), count=k) for k in DRAFTS})
        for name, source in sources.items()
    }


def _replayed_coupled(answer: Answer) -> dict[str, Replayed]:
    """A coupled answer after the first token that changed; empty if none did."""
    thrown = answer.before
    start = num_right(thrown, answer.coupled) + 1
    head, rest = [*answer.prompt, *answer.coupled[:start]], answer.coupled[start:]
    if not rest or start > len(thrown):
        return {}

    def old() -> Advance:
        return complete(answer.prompt, [thrown], skip=start - 1)

    def both() -> Advance:
        return together(own_source(head, rest), old())

    by_table = {k: steps_with(head, rest, old(), count=k) for k in DRAFTS}
    by_place = {k: aligned_steps(answer.coupled, thrown, start=start, count=k) for k in DRAFTS}
    by_both = {k: steps_with(head, rest, both(), count=k) for k in DRAFTS}
    return {
        "coupled": Replayed(len(rest), by_table),
        "aligned": Replayed(len(rest), by_place),
        "coupled and own": Replayed(len(rest), by_both),
    }


def write_answers(settings: Settings) -> list[Answer]:
    """Generate every answer three times, with updates in between."""
    import torch

    from coupling_study.master import Master
    from coupling_study.questions import QUESTIONS
    from experiments.questions import QuestionSettings, question_rows
    from sortedrl.core.randomness import mix
    from sortedrl.engines.native import NativeEngine
    from sortedrl.models.loading import load_model, load_tokenizer
    from sortedrl.types import Trajectory, Weights

    if settings.model is None:
        raise SystemExit(f"{settings.answers} does not exist; set --model to generate the answers")
    torch.set_num_threads(settings.threads)
    tokenizer = load_tokenizer(settings.model)
    model = load_model(settings.model, dtype=torch.float32, device="cpu")
    asked = [
        ("arithmetic", str(row["prompt"]))
        for row in question_rows(QuestionSettings(count=settings.arithmetic, seed=settings.seed))
    ] + [("open-ended", question) for question in QUESTIONS[: settings.open_ended]]
    prompts = []
    for _, question in asked:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompts.append(list(tokenizer(text, add_special_tokens=False)["input_ids"]))
    engine = NativeEngine(
        model, slots=settings.slots, max_tokens=settings.max_tokens, tokenizer=tokenizer,
        cache_bytes=2 << 30,
    )  # fmt: skip
    master = Master(model, micro_batch=4)

    def written(what: str, *, seed: int) -> list[Trajectory]:
        began = time.perf_counter()
        answers = engine.generate(
            prompts, samples_per_prompt=settings.samples, seed=seed, progress=False
        )
        tokens = sum(answer.num_tokens for answer in answers)
        rate = tokens / (time.perf_counter() - began)
        print(f"{what}: {len(answers)} answers, {tokens:,} tokens, {rate:.0f}/s", file=sys.stderr)
        return answers

    before = written("epoch before", seed=mix(settings.seed, 0))
    master.begin_training(learning_rate=settings.learning_rate)
    for update in range(settings.updates):
        batch = before[update :: max(1, len(before) // settings.update_batch)]
        batch = batch[: settings.update_batch]
        signs = [1 if mix(settings.seed, update, place) & 1 else -1 for place in range(len(batch))]
        master.update(batch, signs)
        print(f"update {update + 1} done", file=sys.stderr)
    engine.load_weights(Weights(1))
    coupled = written("coupled", seed=mix(settings.seed, 0))
    epoch = written("epoch", seed=mix(settings.seed, 1))
    return [
        Answer(
            kind=asked[old.prompt.id][0],
            prompt=list(old.prompt.tokens),
            before=list(old.tokens),
            epoch=list(new.tokens),
            coupled=list(same.tokens),
        )
        for old, new, same in zip(before, epoch, coupled, strict=True)
    ]


def logged_answers(log: Path) -> list[Answer]:
    """The answers in the second half of a run's log, when it has learnt."""

    def split(text: object) -> list[int]:
        return [known.setdefault(part, len(known)) for part in _PARTS.findall(str(text))]

    known: dict[str, int] = {}
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [
        Answer("log of a run", split(row["question"]), [], split(row["response"]), [])
        for row in rows[len(rows) // 2 :]
    ]


def stored_answers(settings: Settings) -> list[Answer]:
    """The answers in the file, generated first if it does not exist."""
    if settings.answers is None:
        raise SystemExit("give a file with --answers, or the log of a run with --log")
    if not settings.answers.exists():
        answers = write_answers(settings)
        stored = {
            **provenance("cpu"),
            "answers": [
                [answer.kind, answer.prompt, answer.before, answer.epoch, answer.coupled]
                for answer in answers
            ],
        }
        settings.answers.write_text(json.dumps(stored, default=str) + "\n")
    read = json.loads(settings.answers.read_text())
    return [Answer(*fields) for fields in read["answers"]]


def main() -> None:
    """Generate or read the answers, replay them and print the table."""
    settings = tyro.cli(Settings, description=__doc__)
    answers = stored_answers(settings) if settings.log is None else logged_answers(settings.log)
    lengths = [len(answer.epoch) for answer in answers]
    print(f"{len(answers)} answers, {sum(lengths) / len(lengths):.0f} tokens on average")
    head = ("answers", "source", "number", *(f"k = {k}" for k in DRAFTS))
    rows = [
        [row.kind, row.source, str(row.answers), *(f"{row.per_step[k]:.2f}" for k in DRAFTS)]
        for row in replay(answers)
    ]
    print(markdown_table(head, rows))


if __name__ == "__main__":
    main()
