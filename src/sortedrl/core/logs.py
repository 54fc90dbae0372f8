"""The metrics and sample answers of a run, `metrics.jsonl` and `answers.jsonl`, and every key.

`metrics.jsonl` has one JSON object of numbers per update; a number that is not finite is written as
null, so any JSON reader can read the file. `METRIC_KEYS` says what its numbers mean: the reference
page is made from it. `answers.jsonl` has some answers of every update as text, one JSON object
each; nothing is computed from it.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sortedrl.core.files import LineFile, read_lines
from sortedrl.errors import DataError

Value = float | int | str | None
"""What a row of metrics may hold."""


class MetricsFile(LineFile):
    """Appends one row per update."""

    def __call__(self, values: Mapping[str, Value]) -> None:
        """Append the numbers of an update, at once visible to readers."""
        row = {name: _finite(value) for name, value in values.items()}
        self.write(json.dumps(row, separators=(",", ":"), allow_nan=False))
        self.flush()


def read_metrics(path: Path) -> list[dict[str, Value]]:
    """The rows of a file, in order; a last line without its newline is skipped."""
    rows: list[dict[str, Value]] = []
    for number, line in read_lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(path, f"not JSON: {error}", line=number) from error
        if not isinstance(row, dict) or any(isinstance(v, list | dict) for v in row.values()):
            raise DataError(path, "expected a JSON object of numbers and text", line=number)
        huge = [n for n, v in row.items() if isinstance(v, int) and abs(v) > sys.float_info.max]
        if huge:
            raise DataError(path, f"{huge[0]!r} is too large a number", line=number)
        rows.append(row)
    return rows


def _finite(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value


_MOST = 2**63
_MOST_REWARD = sys.float_info.max


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedAnswer:
    """An answer that was trained on."""

    update: int
    """The update that was trained on it, counted from 1."""
    prompt: int
    sample: int
    group: int
    versions: tuple[int, int]
    """The versions of the weights that wrote its oldest and its newest token."""
    tokens: int
    is_truncated: bool
    reward: float | None
    parts: Mapping[str, float]
    """The named parts of the reward."""
    question: str
    response: str


class AnswerFile(LineFile):
    """Appends answers."""

    def __call__(self, answers: Iterable[LoggedAnswer]) -> None:
        """Append the answers of an update, at once visible to readers."""
        for answer in answers:
            self.write(json.dumps(asdict(answer), separators=(",", ":"), default=dict))
        self.flush()


def read_answers(path: Path) -> list[LoggedAnswer]:
    """The answers of a file, in order; a last line without its newline is skipped."""
    return [_answer(path, number, line) for number, line in read_lines(path)]


def _answer(path: Path, number: int, line: str) -> LoggedAnswer:
    try:
        row = json.loads(line)
        answer = LoggedAnswer(**{**row, "versions": tuple(row["versions"])})
        if not _is_sound(row):
            raise ValueError("a field has a value of another type")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        names = ", ".join(f.name for f in fields(LoggedAnswer))
        raise DataError(path, f"expected an object with {names}", line=number) from error
    return answer


def _is_sound(row: Mapping[str, Any]) -> bool:
    """Whether every field has a value of its type."""
    counts = [row[name] for name in ("update", "prompt", "sample", "group", "tokens")]
    parts, reward = row["parts"], row["reward"]
    if not isinstance(parts, dict) or len(row["versions"]) != 2:
        return False
    rewards = [*parts.values(), *([] if reward is None else [reward])]
    return (
        all(type(count) is int and abs(count) < _MOST for count in (*counts, *row["versions"]))
        and all(isinstance(value, int | float) and abs(value) <= _MOST_REWARD for value in rewards)
        and isinstance(row["is_truncated"], bool)
        and all(isinstance(row[name], str) for name in ("question", "response"))
    )


METRIC_KEYS: Mapping[str, Mapping[str, str]] = {
    "Where the run is": {
        "update": "update batches so far",
        "version": "how often the weights have changed",
        "total/seconds": "seconds since the run began, evaluations excluded",
        "total/samples": "answers trained on so far",
        "total/trained_tokens": "tokens trained on so far",
        "total/decoded_tokens": "tokens generated so far",
    },
    "Answers of the update": {
        "reward/mean": "mean reward, before overlong shaping",
        "reward/std": "standard deviation of the rewards (divided by n)",
        "reward/PART": "mean of a part that the reward names",
        "length/mean": "tokens per answer",
        "length/truncated": "share of the answers that reached the token limit",
        "advantage/std": "standard deviation of the advantages over tokens",
        "unusable_answers": "answers left out: reward or a log-probability not finite",
        "held": "answers held back by dynamic sampling; such a row has no numbers of an update",
    },
    "The update": {
        "loss": "mean loss of the optimiser steps",
        "grad_norm": "gradient norm before clipping, the largest of several steps",
        "learning_rate": "learning rate of the last step",
        "value_loss": "loss of the critic (ppo)",
        "skipped_steps": "steps skipped because loss or gradient was not finite",
        "loss_scale": "float16 only: factor on the loss in the backward pass",
        "fill": "how full the packed micro-batches were",
        "update_seconds": "time of the update alone",
        "entropy/mean": "entropy of the policy in nats, where it is computed",
        "kl/mean": "KL divergence from the reference, where there is one",
        "kl/reference_age": "updates since the reference was refreshed (reference_refresh)",
        "policy/ratio_p1": "quantile of the clipped ratio: 1 % of the tokens lie below",
        "policy/ratio_p50": "median of the clipped ratio",
        "policy/ratio_p99": "quantile of the clipped ratio: 99 % of the tokens lie below",
        "policy/ratio_max": "largest clipped ratio",
        "policy/clipped_low": "share of the tokens whose gradient stopped at the lower clip bound",
        "policy/clipped_high": "share of the tokens whose gradient stopped at the upper one",
        "policy/clipped_dual": "share of the tokens at the dual clip",
    },
    "Engine against trainer, and stale tokens": {
        "gap/mean": "mean absolute difference of log-probabilities between engine and trainer "
        "on fresh tokens, in nats",
        "gap/max": "the largest such difference; below 1e-4 in fp32 on a CPU",
        "correction/ess": "effective sample size of the importance weights, as a share of tokens",
        "correction/ratio_p1": "quantile of the importance ratio: 1 % of the tokens lie below",
        "correction/ratio_p50": "median importance ratio",
        "correction/ratio_p99": "quantile of the importance ratio: 99 % of the tokens lie below",
        "correction/ratio_max": "largest importance ratio",
        "correction/held_back": "share of the tokens whose weight is truncated or masked",
        "correction/masked": "share of the tokens that correction.mask masks; only with a mask",
        "correction/step_scale": "factor of scale_by_ess on the learning rate; only with it",
        "stale_AGE/share": "share of the tokens of this staleness: 0 to 3, 4_up",
        "stale_AGE/ratio": "their mean importance ratio",
        "stale_AGE/ess": "their effective sample size, as a share",
    },
    "Rollout since the update before": {
        "rollout/bubble": "idle share of the slots while answers were generated",
        "rollout/outside_bubble": "the part of it in which an environment was awaited",
        "rollout/idle_share": "idle share of the slots over all time, updates included",
        "rollout/goodput": "trained tokens per second of rollout",
        "rollout/throughput": "decoded tokens per second of rollout",
        "rollout/trained_per_second": "trained tokens per second, updates included",
        "rollout/mean_length": "tokens per answer trained on",
        "rollout/decoded_tokens": "tokens generated",
        "rollout/trained_tokens": "tokens trained on",
        "rollout/discarded_tokens": "tokens discarded: redrawn, too old, or not verified",
        "rollout/cached_tokens": "tokens neither trained nor discarded yet",
        "rollout/kept_tokens": "tokens reused from the cache at a resume",
        "rollout/prefilled_again_tokens": "tokens prefilled to resume answers",
        "rollout/mean_staleness": "mean staleness of the tokens trained on",
        "rollout/max_staleness": "largest staleness of a token trained on",
        "rollout/mean_trajectory_staleness": "mean staleness of the oldest token of an answer",
        "rollout/updates": "updates in this window",
        "rollout/trajectories": "answers trained on in this window",
        "rollout/rollout_seconds": "seconds of rollout",
        "rollout/seconds": "seconds in all",
    },
    "Clusters": {
        "hand_over/seconds": "seconds of the weight sync",
        "hand_over/bytes": "bytes of one copy of the weights",
        "hand_over/buckets": "buckets the weights were sent in",
        "hand_over/workers": "workers that received them",
        "hand_over/put_seconds": "seconds until the slowest bucket was on its way",
        "hand_over/fetch_seconds": "seconds until the slowest worker had them",
        "hand_over/load_seconds": "seconds until the slowest worker generated with them",
        "overlap/update_seconds": "cluster.overlap: how long the update took",
        "overlap/beside_seconds": "the part of it that overlapped the rollout",
        "overlap/waited_seconds": "the rest, which the run waited for",
    },
    "Evaluation": {
        "evaluation/score": "share of right answers, mean over the held-out tasks",
        "evaluation/TASK": "share of right answers of one task",
        "evaluation/length": "tokens per held-out answer",
        "evaluation/turns": "turns of the policy per held-out conversation",
        "evaluation/outside_seconds": "seconds that one waited for its environment",
    },
}
"""Section -> key -> meaning."""

_PATTERNS = [
    re.compile("".join(r".+" if part.isupper() else re.escape(part) for part in parts))
    for keys in METRIC_KEYS.values()
    for key in keys
    for parts in [re.split(r"(PART|TASK|AGE)", key)]
]


def is_described(key: str) -> bool:
    """Whether the table has this key of a row.

    >>> is_described("stale_4_up/share"), is_described("reward/format"), is_described("lost")
    (True, True, False)
    """
    return any(pattern.fullmatch(key) for pattern in _PATTERNS)
