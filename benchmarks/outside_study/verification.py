"""Whether vLLM's prompt pass gives our engine's verdict, and a resumed answer is the true one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from outside_study.answers import ANSWER_TOKENS, cut, same_answers, token_share
from outside_study.engine import ALL, Setting, prompt_pass, vllm_engine, write
from outside_study.finding import Finding
from outside_study.verdict import Verdict, verdicts
from outside_study.worker import kept_in_worker, watch_prompt_pass
from outside_study.world import VOCABULARY, World, native_answers
from sortedrl.types import Trajectory

if TYPE_CHECKING:
    from vllm import LLM

CANDIDATES = (ALL, 20)
SETTINGS = {
    "": Setting(),
    ", priority, chunks of 32, no prefix cache": Setting(
        slots=7, batched_tokens=32, prefix_caching=False, policy="priority"
    ),
}


def study_verification(world: World) -> Iterator[Finding]:
    """Verdicts under unchanged and changed weights, on the host and in the worker."""
    fresh = world.trajectories
    with vllm_engine(world.old_folder, Setting()) as llm:
        cached = write(llm, fresh)
        for k in CANDIDATES:
            found = verdicts(cached, prompt_pass(llm, cached, k=k), vocabulary=VOCABULARY)
            yield from _kept(found, note=f"unchanged weights, k = {k}")
    native = native_answers(world.new, cached, version=1)
    native_kept = [
        ANSWER_TOKENS - (n.decoded_tokens - c.decoded_tokens)
        for n, c in zip(native, cached, strict=True)
    ]
    share = token_share(native_kept)
    yield Finding("cached tokens kept", share, "share", "changed weights, native engine")
    for name, setting in SETTINGS.items():
        with vllm_engine(world.new_folder, setting) as llm:
            truth = write(llm, fresh)
            for k in CANDIDATES:
                note = f"changed weights, k = {k}{name}"
                found = verdicts(cached, prompt_pass(llm, cached, k=k), vocabulary=VOCABULARY)
                yield from _kept(found, note=note)
                yield _agreement([v.kept for v in found], native_kept, note=note)
                same = same_answers(_resumed(llm, cached, found), truth)
                yield Finding("resumed equals written anew", same, "answers", note)
            llm.collective_rpc(watch_prompt_pass)
            prompt_pass(llm, cached, k=0)
            note = f"changed weights, in the worker{name}"
            yield _agreement([kept_in_worker(t) for t in cached], native_kept, note=note)
    yield Finding("redecoded answers equal to native's", same_answers(truth, native), "answers")


def _kept(found: Sequence[Verdict], *, note: str) -> Iterator[Finding]:
    share = token_share([verdict.kept for verdict in found])
    yield Finding("cached tokens kept", share, "share", note)
    still_open = sum(not verdict.is_known for verdict in found)
    yield Finding("answers cut where the verdict was open", still_open, "answers", note)


def _agreement(kept: Sequence[int], native_kept: Sequence[int], *, note: str) -> Finding:
    same = sum(ours == theirs for ours, theirs in zip(kept, native_kept, strict=True))
    return Finding("same verdict as native", same, "answers", note)


def _resumed(llm: LLM, cached: Sequence[Trajectory], found: Sequence[Verdict]) -> list[Trajectory]:
    """The cached answers, cut where the verdict says and written to their end again."""
    begun = [cut(t, verdict.kept) for t, verdict in zip(cached, found, strict=True)]
    unfinished = [t for t in begun if t.num_tokens < ANSWER_TOKENS]
    ended = {t.key: t for t in write(llm, unfinished, version=1)}
    return [ended.get(t.key, t) for t in begun]
