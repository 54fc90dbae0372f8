"""Files of a run: atomic writes, files that grow line by line, metrics and sample answers.

A file that we did not write is never overwritten. In a file of lines only complete lines count: a
last line without its newline belongs to a run that was killed or is still writing, and readers skip
it. A resumed run truncates its files to their lengths at the checkpoint, so what was written after
the checkpoint is written again, once.

`metrics.jsonl` has one JSON object of numbers per update; a number that is not finite is written as
null, so any JSON reader can read the file. `METRIC_KEYS` says what its numbers mean: the reference
page is made from it. `answers.jsonl` has some answers of every update as text, one JSON object
each; nothing is computed from it.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

from sortedrl.errors import DataError

_LOOKED_AT = 512
_GZIP = b"\x1f\x8b"


def write_whole(path: Path, content: bytes) -> None:
    """Write the file atomically: either all of it is new or the old one is untouched."""
    with writing_whole(path) as file:
        file.write(content)


@contextmanager
def writing_whole(path: Path) -> Iterator[IO[bytes]]:
    """A temporary file to write to, renamed to `path` when the block succeeds.

    A symbolic link is followed; a device is written to directly.
    """
    path = path.resolve()
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as file:
            yield file
        return
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def refuse_foreign(path: Path, *, mark: bytes | None) -> None:
    """Refuse to replace a file that we did not write, recognised by `mark` near its beginning.

    Without a mark, any file that is not empty is refused.
    """
    try:
        if not path.is_file() or not path.stat().st_size:
            return
        with path.open("rb") as file:
            beginning = file.read(_LOOKED_AT)
        if beginning.startswith(_GZIP):
            with gzip.open(path) as packed:
                beginning = packed.read(_LOOKED_AT)
    except (OSError, EOFError, zlib.error):
        beginning = b""
    if mark is None or mark not in beginning:
        what = "a file" if mark is None else "a file that this command did not write"
        raise DataError(path, f"is {what} and is not replaced; remove it or choose another path")


class LineFile:
    """Appends lines to a file."""

    def __init__(self, path: Path, *, keep_bytes: int | None = None) -> None:
        """Create the file, replacing an older one; or keep its first bytes and append to them."""
        self._path = path
        with self._os_errors():
            if keep_bytes:
                _cut(path, keep_bytes)
            self._file: IO[bytes] = path.open("ab" if keep_bytes else "wb")

    def write(self, line: str) -> None:
        """Append a line, given without its newline; it may stay in memory for a while."""
        with self._os_errors():
            self._file.write(line.encode() + b"\n")

    def flush(self) -> None:
        """Make every line so far visible to other programs."""
        with self._os_errors():
            self._file.flush()

    def sync(self) -> int:
        """Write every line so far to the disk; returns the length of the file in bytes."""
        self.flush()
        with self._os_errors():
            os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Write out what is buffered."""
        with self._os_errors():
            self._file.close()

    @contextmanager
    def _os_errors(self) -> Iterator[None]:
        """Raise an error of the operating system as a `DataError`."""
        try:
            yield
        except OSError as error:
            reason = f"cannot be written ({error.strerror}); check the path and the free disk space"
            raise DataError(self._path, reason) from error


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The complete lines of a file, each with its number; an incomplete last one is skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise DataError(path, f"not UTF-8 text ({error.reason})", line=number) from error
            yield number, text


def _cut(path: Path, keep_bytes: int) -> None:
    """Truncate the file to its first bytes, which must be complete lines."""
    try:
        file = path.open("r+b")
    except FileNotFoundError as error:
        raise DataError(
            path,
            f"must hold the first {keep_bytes} bytes of the run to resume, but is missing; "
            "restore it next to the checkpoint, or start a new run in another folder",
        ) from error
    with file:
        found = file.seek(0, os.SEEK_END)
        file.seek(keep_bytes - 1)
        if found < keep_bytes or file.read(1) != b"\n":
            raise DataError(
                path,
                f"must hold {keep_bytes} bytes of complete lines for this checkpoint, found "
                f"{found} bytes or other lines; it belongs to another run or was changed: restore "
                "the right file, or start a new run in another folder",
            )
        file.truncate(keep_bytes)


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
        "evaluation/reward/TASK": "mean reward of one task, if rewards are not 1 and 0",
        "evaluation/length": "tokens per held-out answer",
        "evaluation/turns": "turns of the policy per held-out conversation",
        "evaluation/outside_seconds": "seconds that one waited for its environment",
    },
}
"""Section -> key -> meaning."""
