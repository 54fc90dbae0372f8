"""A server that writes answers without a model, and verl's manager of such servers."""

import asyncio
from types import SimpleNamespace
from typing import Any

import ray

from sortedrl.core.randomness import mix

STOP, START, VOCABULARY = 1, 2, 60


def noise(seed: int, position: int) -> int:
    """The token that an answer has at a position."""
    return 4 + mix(seed, position) % (VOCABULARY - 4)


def length_of(seed: int) -> int:
    """The number of tokens of an answer: mostly short, sometimes long."""
    return 2 + (mix(seed, 1) % 6) * (1 + 7 * (mix(seed, 2) % 4 == 0))


_WITHOUT_VERL = {"env_vars": {"VERL_USE_EXTERNAL_MODULES": ""}}
_TICK_SECONDS = 0.03


@ray.remote(num_cpus=0, runtime_env=_WITHOUT_VERL)
class FakeServer:
    """Generates a token of every answer per tick; stops and goes on when it is told to."""

    def __init__(self) -> None:
        """Runs at once."""
        self._version, self._unseeded, self._fail = 0, 0, 0
        self._may_run = asyncio.Event()
        self._may_run.set()

    async def fail(self, times: int) -> None:
        """The next requests raise."""
        self._fail = times

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: object
    ) -> SimpleNamespace:
        """Go on after `prompt_ids`; aborted answers come back with the tokens they have."""
        await self._may_run.wait()
        if self._fail:
            self._fail -= 1
            raise RuntimeError("out of memory, as the test says")
        seed = sampling_params.get("seed")
        if seed is None:
            self._unseeded += 1
            seed = mix(99, self._unseeded)
        # The prompt ends with START; what follows was generated before.
        done = len(prompt_ids) - 1 - max(i for i, token in enumerate(prompt_ids) if token == START)
        tokens: list[int] = []
        length = length_of(seed)
        while done + len(tokens) < length:
            if not self._may_run.is_set():
                return self._output(tokens, "aborted")
            position = done + len(tokens)
            tokens.append(STOP if position == length - 1 else noise(seed, position))
            await asyncio.sleep(_TICK_SECONDS)
        return self._output(tokens, "completed")

    def _output(self, tokens: list[int], reason: str) -> SimpleNamespace:
        return SimpleNamespace(
            token_ids=tokens,
            log_probs=[-1.0] * len(tokens),
            stop_reason=reason,
            num_preempted=0,
            routed_experts=None,
            extra_fields={"global_steps": self._version},
        )

    async def stop(self) -> None:
        """Abort everything and pause."""
        self._may_run.clear()

    async def load(self, version: int) -> None:
        """New weights."""
        self._version = version

    async def resume(self) -> None:
        """Go on."""
        self._may_run.set()


class FakeServers:
    """verl's LLMServerManager and CheckpointEngineManager over one fake server."""

    def __init__(self) -> None:
        """Start the server and verl's own load balancer in front of it."""
        from verl.workers.rollout.router import GlobalRequestLoadBalancer

        self.server = FakeServer.remote()
        balancer = ray.remote(GlobalRequestLoadBalancer)
        self._balancer = balancer.options(num_cpus=0, runtime_env=_WITHOUT_VERL).remote(
            servers={"server": self.server}
        )
        self.config: Any = None

    def get_client(self, client_cls: Any) -> Any:
        """As LLMServerManager."""
        return client_cls(config=self.config, load_balancer_handle=self._balancer)

    def abort_replicas(self) -> None:
        """As CheckpointEngineManager."""
        ray.get(self.server.stop.remote())

    def sleep_replicas(self) -> None:
        """Nothing to free."""

    def update_weights(self, global_steps: int) -> None:
        """Tell the version."""
        ray.get(self.server.load.remote(global_steps))

    def resume_generation_replicas(self) -> None:
        """As CheckpointEngineManager."""
        ray.get(self.server.resume.remote())
