"""Whether vLLM writes our engine's answers, and in which of its ways of decoding."""

from __future__ import annotations

from collections.abc import Iterator

from outside_study.answers import logprob_difference, same_answers
from outside_study.engine import Setting, Way, vllm_engine, write
from outside_study.finding import Finding
from outside_study.processor import SEEN
from outside_study.world import World, native_answers
from sortedrl.engines.native.noise import stream


def study_decoding(world: World) -> Iterator[Finding]:
    """Whether vLLM writes our engine's answers, at two temperatures and in two batchings."""
    fresh = world.trajectories
    with vllm_engine(world.old_folder, Setting()) as llm:
        for temperature in (1.0, 0.7):
            ours = native_answers(world.old, fresh, temperature=temperature)
            SEEN.clear()
            theirs = write(llm, fresh, way=Way(temperature=temperature))
            note = f"temperature {temperature}"
            yield Finding("answers equal to native", same_answers(ours, theirs), "answers", note)
            equal = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.tokens == b.tokens]
            seen = [[SEEN[stream(a.seed, 0), p] for p in range(a.num_tokens)] for a, _ in equal]
            native = [a.logprobs for a, _ in equal]
            reported = logprob_difference(native, [b.logprobs for _, b in equal])
            yield Finding("log-probability as vLLM reports it", reported, "nats off", note)
            inside = logprob_difference(native, seen)
            yield Finding("log-probability from the processor", inside, "nats off", note)
        base = write(llm, fresh)
    other = Setting(slots=7, batched_tokens=32, prefix_caching=False)
    with vllm_engine(world.old_folder, other) as llm:
        again = write(llm, fresh[::-1])[::-1]
    note = "7 slots, chunks of 32, reversed order"
    yield Finding("answers equal in another batching", same_answers(base, again), "answers", note)
    pairs = [
        a == b
        for one, two in zip(base, again, strict=True)
        if one.tokens == two.tokens
        for a, b in zip(one.logprobs, two.logprobs, strict=True)
    ]
    yield Finding("log-probabilities equal to the bit", sum(pairs) / len(pairs), "share", note)


def study_drafts(world: World) -> Iterator[Finding]:
    """Whether vLLM takes a logits processor together with speculative decoding.

    A refused engine leaves vLLM unable to start another in this process.
    """
    what = "logits processor with speculative decoding"
    try:
        with vllm_engine(world.old_folder, Setting(), draft="ngram"):
            yield Finding(what, 1, "accepted")
    except ValueError as refusal:
        yield Finding(what, 0, "accepted", str(refusal).strip().splitlines()[-1])
