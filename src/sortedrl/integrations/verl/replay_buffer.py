"""Which prompts are trained next: those of the oldest group first, and of these the shortest.

prompt in TransferQueue    what happens to it
pending, running           it is waited for
finished                   trained, or submitted again if its tokens are too old for the mode
failure                    submitted again, at most three times

verl drops failed and stale prompts and takes new ones from the data; here every prompt is trained.
Prompts are numbered in the order of the data; `group_prompts` consecutive ones are a group.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import transfer_queue
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from sortedrl.config.schedule import Schedule
from sortedrl.errors import TrainingError

TRAIN = "train"
NUMBER = "sortedrl_number"
"""The tag of a prompt that holds its number."""
_MAX_FAILURES = 3


class SortedReplayBuffer(ReplayBufferAsync):
    """verl's replay buffer with the order of the schedule, that loses no prompt."""

    def __init__(
        self,
        *,
        schedule: Schedule,
        submit_again: Callable[[Sequence[str]], None],
        check_workers: Callable[[], None],
        poll_interval: float = 1.0,
    ) -> None:
        """`submit_again` takes the ids of complete prompts whose answers are to be replaced."""
        super().__init__(
            trainer_mode="sortedrl",
            trainer_config={},
            max_off_policy_threshold=None,
            max_off_policy_strategy="wait",
            sampler_kwargs={},
            poll_interval=poll_interval,
        )
        self.schedule = schedule
        self._submit_again = submit_again
        self._check_workers = check_workers
        self._numbers: dict[str, int] = {}
        self._failures: Counter[str] = Counter()

    def queued(self) -> Mapping[str, int]:
        """The numbers of all prompts that are not trained yet, by id."""
        tags = (transfer_queue.kv_list(TRAIN) or {}).get(TRAIN, {})
        self._numbers = {uid: tag[NUMBER] for uid, tag in tags.items() if tag.get("is_prompt")}
        return self._numbers

    def submitted(self, numbers: Mapping[str, int]) -> None:
        """Take note of new prompts."""
        self._numbers.update(numbers)

    def answers(self, uids: Iterable[str]) -> list[str]:
        """The keys of all answers to these prompts, as of the last look at the queue."""
        wanted = set(uids)
        return [key for key in self.partitions[TRAIN] if _uid(key) in wanted]

    def wait_for_sampleable(
        self, global_steps: int, partition_id: str, target_count: int
    ) -> tuple[set[str], dict[str, Any]]:
        """Wait until so many prompts can be trained on; gives all that can, and numbers to log."""
        if partition_id != TRAIN:
            return super().wait_for_sampleable(global_steps, partition_id, target_count)  # type: ignore[no-any-return]
        last_report, num_stale, num_failed = time.time(), 0, 0
        while True:
            self._sync_metadata_from_transfer_queue()
            failed = set(self.failure_keys[TRAIN])
            stale = self._too_old(self.finished_keys[TRAIN], version=global_steps - 1)
            if again := failed | stale:
                self._count_failures(failed)
                num_stale, num_failed = num_stale + len(stale), num_failed + len(failed)
                self._submit_again(sorted(again, key=self._numbers.__getitem__))
                continue
            ready = set(self.finished_keys[TRAIN])
            if len(ready) >= target_count:
                found = {"stale_prompts": num_stale, "failed_prompts": num_failed}
                return ready, {f"sortedrl/{name}": value for name, value in found.items()}
            self._check_workers()
            last_report = self._wait_for_next_poll(partition_id, last_report)

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, Any], dict[str, int]]:
        if partition_id != TRAIN:
            return super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)  # type: ignore[no-any-return]
        # Of prompts that are not complete, answers may be there without their tags.
        found = self.partitions[TRAIN]
        answers = {key: tag for key, tag in found.items() if _uid(key) in sampleable_keys}
        tokens: Counter[str] = Counter()
        for key, tag in answers.items():
            tokens[_uid(key)] += tag["response_len"]
        group = self.schedule.group_prompts
        order = sorted(
            sampleable_keys,
            key=lambda uid: (self._numbers[uid] // group, tokens[uid], self._numbers[uid]),
        )[:batch_size]
        # A batch has its answers in the order of this dictionary.
        place = {uid: index for index, uid in enumerate(order)}
        keys = sorted((key for key in answers if _uid(key) in place), key=lambda k: place[_uid(k)])
        chosen = {key: answers[key] for key in keys}
        return order, chosen, dict(self.prompt_global_steps[TRAIN])

    def _too_old(self, uids: Iterable[str], *, version: int) -> set[str]:
        """Those with a token older than the mode allows when weights of `version` are trained."""
        partial = self.schedule.keeps_stale_tokens
        allowed = self.schedule.max_staleness if partial else 0
        if allowed is None:
            return set()
        complete, old = set(uids), set[str]()
        for key, tag in self.partitions[TRAIN].items():
            if _uid(key) not in complete:
                continue
            oldest = tag["min_global_steps"]
            if oldest is None:  # an engine that reports no version: that of the submission
                oldest = tag["global_steps"] - 1
            if version - oldest > allowed:
                old.add(_uid(key))
        return old

    def _count_failures(self, uids: Iterable[str]) -> None:
        self._failures.update(uids)
        for uid, count in self._failures.items():
            if count > _MAX_FAILURES:
                raise TrainingError(
                    f"prompt {uid} (number {self._numbers[uid]} of the data) failed {count} times; "
                    "the logs of the agent loop workers say why"
                )


def _uid(key: str) -> str:
    """The prompt of an answer, whose key is uid_session_index."""
    return key.split("_", 1)[0]
