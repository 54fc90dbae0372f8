"""verl's colocated asynchronous trainer, with prompts loaded in groups.

    prepare_step     open the groups that are due: submit their prompts     ours
    sample           wait for train_batch_size prompts                       SortedReplayBuffer
    on_sample_end    abort what runs, free the GPUs                          verl
    ...              log-probabilities, advantages, update                   verl
    on_step_end      new weights, generation continues                       verl

Prompts are numbered in the order of the data, and `group_prompts` consecutive ones are a group. A
group is due when the oldest one that is not completely trained is at most `lookahead` before it.
Trained next are those of the oldest group, and of these the shortest. verl drops failed and stale
prompts and takes new ones from the data; here every prompt is trained:

    prompt in TransferQueue    what happens to it
    pending, running           it is waited for
    finished                   trained, or submitted again if its tokens are too old for the mode
    failure                    submitted again, at most three times

Where the run stands follows from the step and from TransferQueue, which verl saves: there is no
state of ours to save.

In mode `partial` verl's own client resumes an interrupted answer where it stood. In the on-policy
modes `RestartingClient` requests it again, and `SeededAgentLoop` gives every answer a seed, so that
in mode `redraw` the same answer comes back as far as the old and the new weights agree.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import transfer_queue
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.utils import tensordict_utils
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from sortedrl.config.checks import require
from sortedrl.config.schedule import Schedule
from sortedrl.errors import TrainingError
from sortedrl.integrations import schedule_of_batches

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
                    "see the logs of the agent loop workers"
                )


def _uid(key: str) -> str:
    """The prompt of an answer, whose key is uid_session_index."""
    return key.split("_", 1)[0]


MODE_NAME = "sortedrl"
"""The trainer mode, and the agent loop that draws every answer from a seed of its own."""
SEED_NAMES = {"vllm": "seed", "sglang": "sampling_seed"}
"""What the engines call the seed of a request."""
_SINGLE_TURN = ("single_turn_agent", MODE_NAME)


def schedule_for(config: Any) -> Schedule:  # noqa: ANN401  verl's DictConfig
    """The schedule of `trainer.v1.sortedrl`; its sizes follow from verl's own settings."""
    schedule = schedule_of_batches(
        dict(config.trainer.v1.get(MODE_NAME) or {}),
        prompts=config.data.train_batch_size,
        samples=config.actor_rollout_ref.rollout.n,
        prefix=f"trainer.v1.{MODE_NAME}.",
        batch_name="data.train_batch_size",
    )
    _refuse_setup(config)
    if schedule.keeps_stale_tokens:
        _refuse_uncorrected(config)
    else:
        _refuse_on_policy(schedule, config)
    return schedule


def _refuse_setup(config: Any) -> None:  # noqa: ANN401
    sampler = config.trainer.v1.sampler
    require(
        not sampler.custom_sampler.path,
        f"trainer mode {MODE_NAME} has a sampler of its own, got custom_sampler.path "
        f"{sampler.custom_sampler.path!r}; leave it out",
    )
    manager = config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class")
    require(
        manager is None,
        f"trainer mode {MODE_NAME} watches the workers of verl's own agent loop manager, got "
        f"agent_loop_manager_class {manager!r}; leave it out",
    )
    filters = config.algorithm.get("filter_groups") or {}
    require(
        not filters.get("enable"),
        f"trainer mode {MODE_NAME} trains every prompt, got algorithm.filter_groups.enable; turn "
        "it off, or use trainer mode colocate_async",
    )


def _refuse_uncorrected(config: Any) -> None:  # noqa: ANN401
    correction = config.algorithm.get("rollout_correction") or {}
    is_corrected = bool(correction.get("bypass_mode") or correction.get("rollout_is"))
    require(
        bool(config.actor_rollout_ref.rollout.calculate_log_probs) and is_corrected,
        "mode 'partial' trains on tokens of older weights, which needs their log-probabilities; "
        "set actor_rollout_ref.rollout.calculate_log_probs=True and "
        "algorithm.rollout_correction.bypass_mode=True (or rollout_is=token)",
    )


def _refuse_on_policy(schedule: Schedule, config: Any) -> None:  # noqa: ANN401
    mode, rollout = schedule.mode, config.actor_rollout_ref.rollout
    require(
        mode != "coupled",
        "mode 'coupled' needs an engine that verifies cached tokens, which verl has not; set "
        "'redraw', 'on_policy' or 'partial'",
    )
    agent_loop = rollout.agent.default_agent_loop
    require(
        agent_loop in _SINGLE_TURN,
        f"mode {mode!r} generates an interrupted answer again from its prompt, so it needs a "
        f"single turn, got agent loop {agent_loop!r}; set mode 'partial'",
    )
    if mode != "redraw":
        return
    require(
        agent_loop == MODE_NAME,
        "mode 'redraw' needs a seed per answer, got agent loop "
        f"{agent_loop!r}; set actor_rollout_ref.rollout.agent.default_agent_loop={MODE_NAME}",
    )
    require(
        rollout.name in SEED_NAMES,
        f"mode 'redraw' needs an engine that takes a seed per answer, got {rollout.name!r}; set "
        "actor_rollout_ref.rollout.name to vllm or sglang, or mode 'on_policy'",
    )
    engine = rollout.engine_kwargs.get("sglang") or {}
    require(
        rollout.name != "sglang" or bool(engine.get("enable_deterministic_inference")),
        "SGLang ignores the seed of an answer unless it is deterministic; set "
        "+actor_rollout_ref.rollout.engine_kwargs.sglang.enable_deterministic_inference=True",
    )


_ABORTED = ("abort", "aborted")
_PAUSE_SECONDS = 0.2


@register_trainer(MODE_NAME)
class SortedTrainer(PPOTrainerColocateAsync):
    """verl's trainer with SortedRL's schedule; every prompt is trained once per epoch."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401  verl's DictConfig
        """Check the configuration before anything is started."""
        self.schedule = schedule_for(config)
        super().__init__(config)
        self._next_number = 0
        self._pings: list[Any] = []

    def _build_replay_buffer(self) -> SortedReplayBuffer:
        return SortedReplayBuffer(
            schedule=self.schedule,
            submit_again=self._submit_again,
            check_workers=self._check_workers,
        )

    def get_llm_client(self) -> Any:  # noqa: ANN401
        """The client that handles an aborted answer according to the mode."""
        if self.schedule.keeps_stale_tokens:
            return super().get_llm_client()
        return self.llm_server_manager.get_client(client_cls=RestartingClient)

    def on_train_begin(self) -> None:
        """Nothing: the first step opens the first groups."""

    def prepare_step(self) -> dict[str, float]:
        """Open the groups that are due."""
        batch, group = self.config.data.train_batch_size, self.schedule.group_prompts
        queued = self.replay_buffer.queued()
        number = (self.global_steps - 1) * batch + len(queued)
        oldest = min(queued.values(), default=number) // group
        end = self.total_training_steps * batch
        while number < end and number // group - oldest <= self.schedule.lookahead:
            size = min(group - number % group, end - number)
            self._next_number = number
            self._add_prompts_to_generate(size)
            number += size
        opened = -(-number // group) - oldest
        return {"sortedrl/queued_prompts": len(queued), "sortedrl/open_groups": opened}

    def _submit_batch_to_rollout(self, batch: Any) -> int:  # noqa: ANN401
        uids = list(batch["uid"])
        numbers = {uid: self._next_number + place for place, uid in enumerate(uids)}
        # Before verl submits them: later, a worker may be writing tags of its own.
        tags = [{NUMBER: number} for number in numbers.values()]
        transfer_queue.kv_batch_put(keys=uids, partition_id=TRAIN, tags=tags)
        self.replay_buffer.submitted(numbers)
        with _saying_how_to_resume():
            return int(super()._submit_batch_to_rollout(batch))

    def _submit_again(self, uids: Sequence[str]) -> None:
        """Generate new answers to complete or failed prompts, in place of those they have."""
        keys = list(uids)
        batch = transfer_queue.kv_batch_get(keys=keys, partition_id=TRAIN)
        if old := self.replay_buffer.answers(keys):
            transfer_queue.kv_clear(keys=old, partition_id=TRAIN)
        tensordict_utils.assign_non_tensor_data(batch, "global_steps", self.global_steps)
        tag = {"is_prompt": True, "status": "pending", "global_steps": self.global_steps}
        transfer_queue.kv_batch_put(keys=keys, partition_id=TRAIN, tags=[dict(tag) for _ in keys])
        with _saying_how_to_resume():
            self.agent_loop_manager.generate_sequences(batch)

    def _check_workers(self) -> None:
        """Fail when an agent loop worker died: its prompts would be waited for for ever."""
        if not self._pings:
            workers = self.agent_loop_manager.agent_loop_workers
            self._pings = [worker.__ray_ready__.remote() for worker in workers]
        answered, self._pings = ray.wait(self._pings, num_returns=len(self._pings), timeout=0)
        with _saying_how_to_resume():
            ray.get(answered)


@contextmanager
def _saying_how_to_resume() -> Iterator[None]:
    """Inside, the death of an agent loop worker is an error that says what to do."""
    try:
        yield
    except ray.exceptions.RayActorError as error:
        raise TrainingError(
            f"an agent loop worker died ({error}); start the run again with "
            "trainer.resume_mode=auto: TransferQueue's checkpoint has every prompt that is not "
            "trained"
        ) from error


class RestartingClient(LLMServerClient):
    """A client that requests an aborted answer again, from its prompt and with the same seed."""

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        **request: Any,  # noqa: ANN401  what verl's agent loops send is verl's business
    ) -> TokenOutput:
        """A complete answer, all of one version of the weights."""
        while True:
            output = await super().generate(
                request_id, prompt_ids=prompt_ids, sampling_params=dict(sampling_params), **request
            )
            if output.stop_reason not in _ABORTED:
                return output
            await asyncio.sleep(_PAUSE_SECONDS)


@register(MODE_NAME)
class SeededAgentLoop(SingleTurnAgentLoop):
    """verl's single-turn agent loop, with a seed that belongs to the prompt and the session."""

    async def run(
        self,
        sampling_params: dict[str, Any],
        priority: int = 0,
        **fields: Any,  # noqa: ANN401  the columns of the data set
    ) -> AgentLoopOutput:
        """Generate one answer."""
        name = SEED_NAMES[self.rollout_config.name]
        seed = seed_of(fields["uid"], fields["session_id"])
        return await super().run({**sampling_params, name: seed}, priority, **fields)


def seed_of(uid: str, session: int) -> int:
    """The seed of an answer: 31 bits, the same whenever its prompt is submitted again."""
    digest = hashlib.sha256(f"{uid}/{session}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
