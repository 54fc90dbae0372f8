"""verl's colocated asynchronous trainer, with prompts loaded in groups.

    prepare_step     open the groups that are due: submit their prompts       ours
    sample           wait for train_batch_size prompts                         replay_buffer
    on_sample_end    abort what runs, free the GPUs                            verl
    ...              log-probabilities, advantages, update                     verl
    on_step_end      new weights, generation goes on                           verl

A group is due when the oldest one that is not completely trained is at most `lookahead` before it.
Where the run stands follows from the step and from TransferQueue, which verl saves: there is no
state of ours to save.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import transfer_queue
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.utils import tensordict_utils

from sortedrl.errors import TrainingError
from sortedrl.integrations.verl.generation import RestartingClient
from sortedrl.integrations.verl.replay_buffer import NUMBER, TRAIN, SortedReplayBuffer
from sortedrl.integrations.verl.settings import MODE_NAME, schedule_for


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
