"""verl's colocated asynchronous trainer, with prompts loaded in groups.

    prepare_step     open the groups that are due: submit their prompts       ours
    sample           wait for train_batch_size prompts                         replay_buffer
    on_sample_end    abort what runs, free the GPUs                            verl
    ...              log-probabilities, advantages, update                     verl
    on_step_end      new weights, generation goes on                           verl

A group is due when the oldest one that is not completely trained is at most `lookahead` before it.
Where the run stands follows from the step and from TransferQueue, which verl saves: there is no
state of ours to save.

In mode `partial` verl's own client resumes an interrupted answer where it stood. In the on-policy
modes `RestartingClient` asks again for it, and `SeededAgentLoop` gives every answer a seed, so that
in mode `redraw` the same answer comes back as far as the old and the new weights agree.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

import ray
import transfer_queue
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.utils import tensordict_utils
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from sortedrl.errors import TrainingError
from sortedrl.integrations.verl.replay_buffer import NUMBER, TRAIN, SortedReplayBuffer
from sortedrl.integrations.verl.settings import MODE_NAME, SEED_NAMES, schedule_for

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
        """The client that does with an aborted answer what the mode says."""
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
        self.agent_loop_manager.generate_sequences(batch)

    def _check_workers(self) -> None:
        """Fail when an agent loop worker died: its prompts would be waited for for ever."""
        if not self._pings:
            workers = self.agent_loop_manager.agent_loop_workers
            self._pings = [worker.__ray_ready__.remote() for worker in workers]
        answered, self._pings = ray.wait(self._pings, num_returns=len(self._pings), timeout=0)
        try:
            ray.get(answered)
        except ray.exceptions.RayActorError as error:
            raise TrainingError(
                f"an agent loop worker died ({error}); start the run again with "
                "trainer.resume_mode=auto: TransferQueue's checkpoint has every prompt that is "
                "not trained"
            ) from error


class RestartingClient(LLMServerClient):
    """A client that asks again for an aborted answer, from its prompt and with the same seed."""

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
