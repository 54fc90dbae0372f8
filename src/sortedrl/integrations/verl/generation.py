"""The on-policy modes on verl's servers: an interrupted answer is generated again from its prompt.

`RestartingClient` asks again; `SeededAgentLoop` gives every answer a seed of its own, so that in
mode `redraw` the same answer comes back as far as the old and the new weights agree.
In mode `partial` verl's own client resumes an answer where it was interrupted.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from sortedrl.integrations.verl.settings import MODE_NAME, SEED_NAMES

_ABORTED = ("abort", "aborted")
_PAUSE_SECONDS = 0.2


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
