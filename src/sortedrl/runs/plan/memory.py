"""The memory of a run on one device, part by part.

On a single device the policy and the native engine share their weights. What an update needs for
its passes is free while the engine writes, and the other way round, so of these two only the
larger one counts. The parts add up to the total.

Trainer ranks each hold an even share of what the trainer holds, and gather the layers of a pass as
they are needed. Colocated, the engine sleeps during an update: vLLM and SGLang drop their weights
and their cache, the native engine its cache. While the engine writes, the ranks keep their models
alone: masters and moments rest in main memory, and there are no gradients. So an update and a
rollout do not add up, and the larger of the two decides. Separated, some devices hold the trainer
and others the engines, and again the larger one decides.

Per trained parameter: 4 bytes of gradient and 8 of moments, all fp32; if the weights have 16 bits,
4 more for their fp32 master. Moments in 8 bits take 2; masters and moments in main memory take none
on the device, but for the pieces of a step. Gradients of 16-bit weights may take 2.
Per token of a pass and layer, kept for the backward pass: each of two norms keeps its input in
fp32 and its result twice, attention its queries, keys, values and result, and the feed-forward
part four times its inner width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sortedrl.runs.plan.cards import Demand

_FULL, _MOMENTS, _GRADIENT = 4, 8, 4
# A code each, and an fp32 scale for 256 of them.
_MOMENTS_8BIT = 2 * (1 + 4 / 256)
# A step in pieces: three times both moments and the master of so many numbers.
_PIECE_NUMBERS, _PIECE_BYTES = 1 << 24, 36
_CHUNK_BYTES = {False: 64 << 20, True: 256 << 20}
_ENGINE_LOGITS_BYTES = 1 << 30
_GPU_SHARE, _CPU_SHARE = 0.94, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Bytes by purpose."""

    weights: int
    """The policy, which the native engine of a single device shares; with its adapters."""
    masters: int
    """fp32 copies that the optimiser works on, of 16-bit weights."""
    moments: int
    """The two moments of AdamW, or the pieces of them that a step brings to the device."""
    gradients: int
    """Summed over the passes of an update."""
    reference: int
    """The model of the divergence; adapters need none."""
    critic: int
    """The second model of PPO, with masters, moments and gradients."""
    engine: int
    """The engine's own weights, if it has some."""
    gathered: int
    """Weights and gradients of the layers at work, of a trainer that is spread out."""
    cache: int
    """Keys and values of running answers."""
    activations: int
    """What one pass keeps for its backward pass."""
    logits: int
    """One chunk of logits forward and backward, and the gradient of the output layer."""
    rollout: int
    """What a pass of the engine needs beyond activations and logits of an update."""

    @property
    def total(self) -> int:
        """All together."""
        return self.trainer + self.generation + self.cache

    @property
    def trainer(self) -> int:
        """The most that the trainer needs."""
        return self.held + self.gathered + self.activations + self.logits

    @property
    def generation(self) -> int:
        """The memory of the engine without its cache."""
        return self.engine + self.rollout

    @property
    def held(self) -> int:
        """The memory that the trainer always holds, unless it shares its GPUs in turns."""
        policy = self.weights + self.masters + self.moments + self.gradients
        return policy + self.reference + self.critic


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory of a run."""

    demand: Demand
    parts: Parts

    @property
    def least(self) -> int:
        """The bytes of a device below which it cannot run."""
        return max(self.update_bytes, self._beside_cache + self.demand.least_cache_bytes)

    @property
    def total(self) -> int:
        """The bytes of a device with which every slot has room for its longest answer."""
        return max(self.update_bytes, self.rollout_bytes)

    @property
    def update_bytes(self) -> int:
        """Bytes on a device of the trainer during an update.

        A native engine that sleeps has only dropped its cache, others their weights too.
        """
        if self.demand.takes_turns:
            return self.parts.trainer + (0 if self.demand.has_engine_copy else self.parts.engine)
        return self.parts.trainer

    @property
    def rollout_bytes(self) -> int:
        """Bytes on a device of an engine if every slot has room for its longest answer."""
        return self._beside_cache + self.parts.cache

    @property
    def models_bytes(self) -> int:
        """Bytes of colocated ranks on a device while the engines generate."""
        demand = self.demand
        critic = _critic_model(demand) if demand.has_critic else 0
        share = demand.ranks_per_device * -(-critic // demand.cluster.num_ranks)
        return self.parts.weights + self.parts.reference + share

    def usable(self, device_bytes: int) -> int:
        """The part of a device that a run can use: the rest is for driver and fragmentation."""
        return int(device_bytes * (_GPU_SHARE if self.demand.is_gpu else _CPU_SHARE))

    def can_run(self, device_bytes: int) -> bool:
        """Whether it runs at all, if only with a small cache."""
        return self.least <= self.usable(device_bytes)

    def cache_bytes(self, device_bytes: int) -> int:
        """The cache that a device has room for, at most what the slots can fill."""
        return max(0, min(self.parts.cache, self.usable(device_bytes) - self._beside_cache))

    def taken(self, device_bytes: int) -> int:
        """The most that a device of an engine holds, with the cache that fits."""
        rollout = self._beside_cache + self.cache_bytes(device_bytes)
        return max(rollout, self.update_bytes) if self.demand.takes_turns else rollout

    def cache_tokens(self, device_bytes: int) -> int:
        """Tokens that the caches of all engines hold, prompts included."""
        demand = self.demand
        each = self.cache_bytes(device_bytes) // demand.engines_per_device
        return demand.cluster.num_engines * (each // demand.cache_token_bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes in main memory of all hosts: always, or while engines generate."""
        demand = self.demand
        if demand.optimiser_state == "offload":
            return _state_bytes(replace(demand, optimiser_state="fp32"))
        return _state_bytes(demand) if demand.takes_turns else 0

    @property
    def _beside_cache(self) -> int:
        """Bytes on the device of an engine besides its cache, which gets the rest."""
        if self.demand.is_separated:
            return self.parts.generation
        trainer = self.models_bytes if self.demand.takes_turns else self.parts.trainer
        return trainer + self.parts.generation


def planned(demand: Demand) -> MemoryPlan:
    """The memory of a demand."""
    shape, size = demand.shape, demand.number_bytes
    trained = demand.trained_parameters
    has_adapters = demand.lora_rank is not None
    own = _policy_bytes(demand)
    ranks = demand.ranks_per_device
    gathered, activations, logits = (
        ranks * part for part in (_gathered(demand), _activations(demand), _logits(demand))
    )
    # Of an engine on the trainer's device only what goes beyond an update counts.
    has_own_turn = demand.is_separated or demand.takes_turns
    free = 0 if has_own_turn else gathered + activations + logits

    def share(num_bytes: int) -> int:
        return ranks * -(-num_bytes // demand.cluster.num_ranks)

    return MemoryPlan(
        demand=demand,
        parts=Parts(
            weights=share(shape.parameters * size + demand.adapter_parameters * _FULL),
            masters=share(trained * own.master),
            moments=share(int(trained * own.moments)) + ranks * own.pieces(trained),
            gradients=share(trained * own.gradient),
            reference=share(
                shape.parameters * size if demand.has_reference and not has_adapters else 0
            ),
            critic=share(_critic(demand) if demand.has_critic else 0),
            engine=demand.engine_bytes,
            gathered=gathered,
            cache=demand.full_cache_bytes,
            activations=activations,
            logits=logits,
            rollout=max(0, demand.engines_per_device * _rollout(demand) - free),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainedBytes:
    """Bytes of a trained number on the device, in addition to its weight."""

    master: int
    moments: float
    gradient: int
    is_in_pieces: bool

    @classmethod
    def of(cls, demand: Demand, *, number_bytes: int) -> _TrainedBytes:
        """Of weights with numbers of this size."""
        is_half, state = number_bytes < _FULL, demand.optimiser_state
        return cls(
            master=_FULL if is_half and state != "offload" else 0,
            moments={"fp32": _MOMENTS, "8bit": _MOMENTS_8BIT, "offload": 0}[state],
            gradient=number_bytes if demand.gradients == "weights" else _GRADIENT,
            is_in_pieces=state != "fp32",
        )

    @property
    def state(self) -> float:
        """The state of the optimiser."""
        return self.master + self.moments

    @property
    def all(self) -> float:
        """Together."""
        return self.state + self.gradient

    def pieces(self, trained: int) -> int:
        """Staging buffers of a step."""
        return _PIECE_BYTES * min(_PIECE_NUMBERS, trained) if self.is_in_pieces else 0


def _policy_bytes(demand: Demand) -> _TrainedBytes:
    # peft keeps adapters in fp32 beside 16-bit weights, so they are their own masters.
    return _TrainedBytes.of(
        demand, number_bytes=demand.number_bytes if demand.lora_rank is None else _FULL
    )


def _critic_model(demand: Demand) -> int:
    """A copy of the policy, and a value head."""
    shape = demand.shape
    return shape.parameters * demand.number_bytes + (shape.hidden + 1) * _FULL


def _critic(demand: Demand) -> int:
    """Such a model, whose output layer is there but not trained."""
    return _critic_model(demand) + sum(int(n * each.all) for n, each in _critic_numbers(demand))


def _critic_numbers(demand: Demand) -> tuple[tuple[int, _TrainedBytes], ...]:
    """Trained numbers of the copied layers, and of the head."""
    shape = demand.shape
    own, head = (_TrainedBytes.of(demand, number_bytes=n) for n in (demand.number_bytes, _FULL))
    return (shape.parameters - shape.output_parameters, own), (shape.hidden + 1, head)


def _state_bytes(demand: Demand) -> int:
    """Masters and moments of all that is trained, on all devices together."""
    critic = _critic_numbers(demand) if demand.has_critic else ()
    numbers = ((demand.trained_parameters, _policy_bytes(demand)), *critic)
    return sum(int(count * each.state) for count, each in numbers)


def _activations(demand: Demand) -> int:
    """Kept by a pass, and the working memory of the layer whose gradient is being computed."""
    shape, size = demand.shape, demand.number_bytes
    norm = (_FULL + 2 * size) * shape.hidden
    attention = 2 * size * (shape.heads + shape.kv_heads) * shape.head_dim
    layer = 2 * norm + attention + 4 * size * shape.inner
    kept = shape.layers * (size * shape.hidden if demand.gradient_checkpointing else layer)
    working = layer * (2 if demand.gradient_checkpointing else 1)
    # An answer is never cut, so a pass is at least as long as the longest one.
    tokens = max(demand.pass_tokens, demand.sequence_tokens)
    return tokens * (kept + working + norm)


def _gathered(demand: Demand) -> int:
    """The embedding and the output layer, a layer and the next one, and a layer's gradients."""
    if demand.cluster.num_ranks == 1:
        return 0
    shape, size = demand.shape, demand.number_bytes
    ends = shape.vocabulary * shape.hidden + shape.output_parameters
    layer = -(-(shape.parameters - ends) // shape.layers)
    return (ends + 2 * layer) * size + layer * (_GRADIENT if demand.lora_rank is None else 0)


def _logits(demand: Demand) -> int:
    shape = demand.shape
    chunk = max(_CHUNK_BYTES[demand.is_gpu], _FULL * shape.vocabulary)
    output = 0 if demand.lora_rank is not None else shape.vocabulary * shape.hidden * _FULL
    return 2 * chunk + output


def _rollout(demand: Demand) -> int:
    """The engine's largest pass: logits of the sampled rows, in the weights' precision and fp32."""
    most = _ENGINE_LOGITS_BYTES // (_FULL * demand.shape.vocabulary)
    slots = demand.engine_slots
    rows = slots + (max(256, 2048 - slots) if demand.is_gpu else 256)
    sampled = max(slots, min(rows, most))
    return sampled * demand.shape.vocabulary * (_FULL + demand.number_bytes)
