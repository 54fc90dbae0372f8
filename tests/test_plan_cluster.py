"""The plan of a cluster: what each GPU holds, what things cost, and what `train` would refuse."""

import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from run_worlds import run_words, said
from sortedrl.config.algorithm import Algorithm
from sortedrl.config.cluster import Cluster
from sortedrl.config.parsing import settings_over
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.config.train import Lora, Rollout, TrainSettings
from sortedrl.errors import ConfigError
from sortedrl.models.shape import KNOWN_SHAPES
from sortedrl.runs.plan.cards import CARDS, Demand, card_named
from sortedrl.runs.plan.memory import Parts, planned
from sortedrl.runs.plan.page import RunPlan, advice, lines
from sortedrl.runs.plan.prediction import predict
from sortedrl.simulate.costs import h100x8_qwen_2_5_32b

GIB = 1 << 30
LLAMA = KNOWN_SHAPES["meta-llama/Llama-3.1-8B"]
QWEN = KNOWN_SHAPES["Qwen/Qwen2.5-32B"]
HELD = ("weights", "masters", "moments", "gradients", "reference", "critic")


def colocated(devices, *, tensor_parallel=1):
    return Cluster(
        kind="colocated",
        rollout_workers=devices // tensor_parallel,
        gpus_per_worker=tensor_parallel,
        tensor_parallel=tensor_parallel,
        trainer_ranks=devices,
    )


COLOCATED = st.builds(
    lambda parallel, engines: colocated(2 * parallel * engines, tensor_parallel=parallel),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 16),
)
SEPARATED = st.builds(
    lambda workers, ranks: Cluster(rollout_workers=workers, gpus_per_worker=1, trainer_ranks=ranks),
    st.integers(1, 16),
    st.integers(2, 16),
)
DEMANDS = st.builds(
    Demand,
    shape=st.sampled_from([LLAMA, QWEN]),
    slots=st.integers(1, 2048),
    max_tokens=st.integers(1, 16384),
    prompt_tokens=st.integers(1, 2048),
    pass_tokens=st.integers(1, 32768),
    precision=st.sampled_from(["float32", "bfloat16"]),
    has_reference=st.booleans(),
    has_critic=st.booleans(),
    has_engine_copy=st.booleans(),
    lora_rank=st.sampled_from([None, 8]),
    gradient_checkpointing=st.booleans(),
)
MATHS = Demand(
    shape=QWEN,
    slots=128,
    max_tokens=8192,
    prompt_tokens=256,
    pass_tokens=16384,
    precision="bfloat16",
    has_critic=True,
    has_engine_copy=True,
    gradient_checkpointing=True,
    optimiser_state="offload",
    gradients="weights",
    cluster=colocated(8, tensor_parallel=8),
)


def with_cluster(demand, **changes):
    return replace(demand, cluster=replace(demand.cluster, **changes))


def doubled(demand):
    cluster = demand.cluster
    return with_cluster(
        demand, rollout_workers=2 * cluster.num_workers, trainer_ranks=2 * cluster.trainer_ranks
    )


# --- memory ---------------------------------------------------------------------------------------


@given(DEMANDS, COLOCATED | SEPARATED)
def test_twice_the_devices_never_hold_more_each(demand, cluster):
    demand = replace(demand, cluster=cluster)
    few, many = planned(demand), planned(doubled(demand))
    for field in fields(Parts):
        if field.name != "rollout":  # the rest of the engine's pass over that of the update
            assert getattr(many.parts, field.name) <= getattr(few.parts, field.name), field.name
    assert many.total <= few.total
    assert many.least <= few.least


def test_ranks_share_the_frozen_weights_and_the_state_of_adapters():
    demand = replace(
        MATHS, has_critic=False, optimiser_state="fp32", gradients="fp32", lora_rank=16
    )
    parts = planned(demand).parts
    adapters = demand.adapter_parameters
    assert parts.weights == -(-(2 * QWEN.parameters + 4 * adapters) // 8)
    assert (parts.moments, parts.gradients) == (adapters, -(-4 * adapters // 8))
    card, two = card_named("h100"), {"number_bytes": 2, "cluster": demand.cluster}
    gathering = card.pass_seconds(QWEN, trained=0, **two)
    assert gathering < card.pass_seconds(QWEN, trained=adapters, **two)
    assert card.pass_seconds(QWEN, trained=adapters, **two) < card.pass_seconds(QWEN, **two)
    settings = TrainSettings(
        cluster=Cluster(rollout_workers=2, trainer_ranks=2), lora=Lora(rank=16)
    )
    assert settings.lora.rank == 16, "ranks are not refused adapters"


@given(DEMANDS, COLOCATED | SEPARATED)
def test_the_shares_of_all_ranks_are_what_one_process_would_hold(demand, cluster):
    alone = planned(demand).parts
    spread = planned(replace(demand, cluster=cluster)).parts
    ranks = cluster.trainer_ranks
    for name in HELD:
        whole, share = getattr(alone, name), getattr(spread, name)
        assert whole <= ranks * share < whole + ranks, name


@settings(max_examples=40)
@given(DEMANDS, COLOCATED | SEPARATED, st.integers(1, 400).map(lambda gib: gib * GIB))
def test_advice_for_several_devices_fits(demand, cluster, device_bytes):
    plan = planned(replace(demand, cluster=cluster))
    changes = advice(plan, device_bytes)
    assert not (changes and plan.can_run(device_bytes))
    for change in changes:
        assert planned(change.demand).can_run(device_bytes), change.text


@given(DEMANDS)
def test_one_device_has_no_part_of_a_trainer_that_is_spread_out(demand):
    plan = planned(demand)
    copy = demand.shape.parameters * demand.number_bytes
    assert plan.parts.gathered == plan.host_bytes == 0
    assert plan.parts.engine == (copy if demand.has_engine_copy else 0)
    assert demand.engine_slots == demand.slots


def test_advice_for_one_process_names_no_cluster():
    plan = planned(replace(MATHS, cluster=Cluster()))
    assert not any("cluster" in change.text for change in advice(plan, 80 * GIB))


def test_an_engine_is_spread_over_its_devices_and_no_head_is_cut():
    one, four, eight = (
        replace(MATHS, cluster=colocated(16, tensor_parallel=parallel)) for parallel in (1, 4, 8)
    )
    assert one.engine_bytes == 4 * four.engine_bytes == 8 * eight.engine_bytes
    assert one.cache_token_bytes == 4 * four.cache_token_bytes == 8 * eight.cache_token_bytes
    assert [demand.engine_slots for demand in (one, four, eight)] == [8, 32, 64]
    many = replace(MATHS, shape=replace(QWEN, heads=48))
    eight, sixteen = (
        replace(many, cluster=colocated(16, tensor_parallel=parallel)) for parallel in (8, 16)
    )
    assert sixteen.cache_token_bytes == eight.cache_token_bytes
    with pytest.raises(ConfigError, match="must divide the 40 heads of the model, got 16"):
        replace(MATHS, cluster=colocated(16, tensor_parallel=16))


def test_the_caches_of_all_engines_hold_as_many_tokens_as_there_is_room_for():
    for parallel in (8, 2):
        cluster = colocated(8, tensor_parallel=parallel)
        plan = planned(replace(MATHS, cluster=cluster, slots=10_000))
        device = 80 * GIB
        whole = 8 * plan.cache_bytes(device) // QWEN.cache_token_bytes(2)
        assert plan.cache_tokens(device) == pytest.approx(whole, rel=1e-5)


@given(DEMANDS, COLOCATED)
def test_what_takes_turns_on_a_gpu_does_not_add_up(demand, cluster):
    plan = planned(replace(demand, cluster=cluster))
    parts = plan.parts
    kept, ranks = 0 if demand.has_engine_copy else parts.engine, cluster.trainer_ranks
    assert plan.update_bytes == parts.trainer + kept
    models = parts.weights + parts.reference
    if demand.has_critic:
        critic = demand.shape.parameters * demand.number_bytes + 4 * (demand.shape.hidden + 1)
        models += -(-critic // ranks)
    assert plan.models_bytes == models <= parts.held, "masters, moments and gradients are away"
    assert plan.rollout_bytes == models + parts.engine + parts.rollout + parts.cache
    assert plan.total == max(plan.update_bytes, plan.rollout_bytes) <= parts.total


def test_what_ranks_in_turns_keep_in_main_memory_is_all_that_an_optimiser_keeps():
    for state, own in (("fp32", 4 + 8), ("8bit", 4 + 2 * (1 + 4 / 256)), ("offload", 4 + 8)):
        demand = replace(MATHS, shape=LLAMA, has_critic=False, optimiser_state=state)
        assert planned(demand).host_bytes == int(LLAMA.parameters * own)
        separated = Cluster(rollout_workers=8, gpus_per_worker=1, trainer_ranks=8)
        apart = planned(replace(demand, cluster=separated)).host_bytes
        assert apart == (planned(demand).host_bytes if state == "offload" else 0)


def test_what_does_not_fit_on_eight_fits_offloaded_or_on_more():
    held = planned(replace(MATHS, optimiser_state="fp32"))
    device = card_named("h100").memory_bytes
    assert not held.can_run(device)
    assert planned(MATHS).can_run(device)
    texts = [change.text for change in advice(held, device)]
    assert texts[:2] == [
        'optimiser.state = "offload"',
        "cluster.rollout_workers = 4 and cluster.trainer_ranks = 32",
    ]


# --- costs ----------------------------------------------------------------------------------------


def test_eight_cards_cost_what_the_simulator_has_for_them():
    ours = card_named("h100").costs(QWEN, number_bytes=2, cluster=MATHS.cluster)
    known = h100x8_qwen_2_5_32b()
    for name in ("cached_token_seconds", "prefill_token_seconds", "update_token_seconds"):
        assert getattr(ours, name) == pytest.approx(getattr(known, name), rel=0.01), name
    assert ours.weight_sync_seconds == pytest.approx(known.weight_sync_seconds, rel=0.01)
    assert ours.step_seconds == pytest.approx(known.step_seconds, rel=0.2)


@pytest.mark.parametrize("name", CARDS)
def test_one_card_costs_the_same_with_and_without_an_empty_cluster(name):
    card = card_named(name)
    costs = card.costs(LLAMA, number_bytes=2)
    assert costs == card.costs(LLAMA, number_bytes=2, cluster=Cluster())
    assert costs.weight_sync_seconds == 0
    assert card.pass_seconds(LLAMA, number_bytes=2, cluster=Cluster()) == 0


def predicted(demand):
    card = card_named("h100")
    return predict(
        planned(demand),
        Schedule(group_prompts=256, update_batch=64),
        card=card,
        device_bytes=card.memory_bytes,
        num_rows=512,
    )


def test_hours_follow_the_cluster():
    small = replace(MATHS, shape=LLAMA, slots=64, cluster=colocated(8))
    eight = predicted(small)
    assert predicted(doubled(small)).hours < eight.hours
    # The state is copied from main memory and back in every step.
    assert predicted(replace(small, optimiser_state="fp32")).hours < eight.hours
    assert predicted(replace(small, has_critic=False)).hours < eight.hours
    assert eight.sync_goodput < eight.goodput


def test_short_passes_are_bound_by_the_weights_that_are_brought_together():
    long = replace(MATHS, max_tokens=256, slots=16)
    assert predicted(replace(long, pass_tokens=512)).hours > predicted(long).hours


# --- words ----------------------------------------------------------------------------------------


def page_of(demand):
    card = card_named("h100")
    plan = RunPlan(
        card=card,
        device_bytes=card.memory_bytes,
        settings=TrainSettings(
            cluster=demand.cluster,
            rollout=Rollout(engine="vllm"),
            schedule=Schedule(mode="partial"),
        ),
        memory=planned(demand),
        prediction=None,
    )
    return "\n".join(lines(plan))


def test_the_page_says_what_one_of_several_devices_holds():
    text = page_of(MATHS)
    assert "devices    8 x NVIDIA H100" in text
    assert "1 rollout worker on 8 GPUs, 8 trainer ranks on the same GPUs, in turns" in text
    assert "main memory   723.6 GiB  masters and moments, pinned" in text
    assert "engine          7.6 GiB  the engine's own weights" in text
    assert "an update, while the engine sleeps" in text
    text = page_of(replace(MATHS, cluster=colocated(8, tensor_parallel=2)))
    assert "4 rollout workers on 2 GPUs each" in text
    assert "cache " in text
    assert "32 slots of up to" in text


def test_separated_engines_and_trainer_are_planned_on_their_own_gpus():
    cluster = Cluster(rollout_workers=4, gpus_per_worker=1, trainer_ranks=2)
    demand = replace(MATHS, shape=LLAMA, has_critic=False, cluster=cluster)
    plan, shared = planned(demand), planned(replace(demand, cluster=colocated(2)))
    assert plan.parts.held == shared.parts.held
    assert plan.total == max(plan.parts.trainer, plan.parts.generation + plan.parts.cache)
    full, full_shared = (replace(p.demand, slots=10_000) for p in (plan, shared))
    assert planned(full).cache_bytes(80 * GIB) > planned(full_shared).cache_bytes(80 * GIB)
    text = page_of(demand)
    assert "devices    6 x NVIDIA H100" in text
    assert "4 rollout workers on 1 GPU each, 2 trainer ranks on others" in text
    assert "trainer GPU" in text
    assert "engine GPU" in text


def test_a_cluster_on_cpus_is_planned_as_one_machine():
    alone = replace(
        MATHS,
        shape=LLAMA,
        is_gpu=False,
        precision="float32",
        optimiser_state="fp32",
        cluster=Cluster(),
    )
    two = replace(alone, cluster=Cluster(rollout_workers=2, trainer_ranks=2))
    assert planned(two).parts.held == planned(alone).parts.held
    assert planned(two).parts.engine == 2 * LLAMA.parameters * 4
    assert planned(two).parts.activations == 2 * planned(alone).parts.activations
    with pytest.raises(ConfigError, match=r"gpus_per_worker 0 must be planned on CPUs"):
        replace(two, is_gpu=True)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel must be at least 1, got 0"),
        ({"tensor_parallel": 2}, "tensor_parallel 2 and gpus_per_worker 0; make them equal"),
        (
            {"tensor_parallel": 2, "gpus_per_worker": 4},
            "tensor_parallel 2 and gpus_per_worker 4; make them equal",
        ),
        (
            {"kind": "colocated", "tensor_parallel": 2, "gpus_per_worker": 2, "trainer_ranks": 2},
            "trainer_ranks must be 4, got 2 with 2 rollout_workers",
        ),
        (
            {"kind": "colocated", "gpus_per_worker": 2, "trainer_ranks": 4},
            r"gpus_per_worker must be tensor_parallel \(1\), or 0 for CPUs, got 2",
        ),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        Cluster(rollout_workers=2, **values)


def test_settings_that_do_not_go_with_tensor_parallelism_are_refused():
    sharded = colocated(8, tensor_parallel=2)
    partial = Schedule(mode="partial")
    with pytest.raises(ConfigError, match=r"needs rollout\.engine 'vllm'.*'native'"):
        TrainSettings(cluster=sharded)
    with pytest.raises(ConfigError, match=r"shared evenly by cluster\.rollout_workers.*got 3"):
        TrainSettings(
            cluster=sharded,
            schedule=partial,
            rollout=Rollout(engine="vllm"),
            engine=EngineSettings(slots=3),
        )
    TrainSettings(cluster=colocated(8))
    TrainSettings(cluster=sharded, schedule=partial, rollout=Rollout(engine="sglang"))


PAIR = ["--cluster.kind", "colocated", "--cluster.rollout-workers", "1"]
SHARDED = [
    *PAIR,
    *("--cluster.gpus-per-worker", "2", "--cluster.tensor-parallel", "2"),
    *("--cluster.trainer-ranks", "2", "--rollout.engine", "vllm", "--schedule.mode", "partial"),
]


@pytest.mark.usefixtures("here")
def test_a_sharded_engine_is_planned_and_not_refused(capsys, tmp_path):
    words = run_words(tmp_path / "run", *SHARDED, model="tiny")
    out, _ = said(capsys, [*words, "--dry-run", "--card", "a100"])
    assert "1 rollout worker on 2 GPUs, 2 trainer ranks on the same GPUs, in turns" in out


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", ["colocated", "separated"])
def test_the_plan_is_of_the_cluster_that_train_would_place(capsys, tmp_path, kind):
    cluster = ["--cluster.rollout-workers", "2", "--cluster.trainer-ranks", "2"]
    words = run_words(tmp_path / "run", *cluster, "--cluster.gpus-per-worker", "1", model="tiny")
    out, _ = said(capsys, [*words, "--dry-run", "--card", "a100", "--cluster.kind", kind])
    where = {"colocated": "on the same GPUs, in turns", "separated": "on others"}[kind]
    assert f"2 rollout workers on 1 GPU each, 2 trainer ranks {where}" in out
    out, _ = said(capsys, [*run_words(tmp_path / "run", *cluster, model="tiny"), "--dry-run"])
    assert "2 rollout workers and 2 trainer ranks, planned as all on this machine" in out


SETTINGS = st.builds(
    lambda cluster, slots, overlong: TrainSettings(
        cluster=cluster,
        engine=EngineSettings(slots=slots * cluster.num_engines, max_tokens=8192),
        algorithm=Algorithm(kl_coef=0.1, overlong_tokens=overlong),
    ),
    st.sampled_from(
        [Cluster(), colocated(2), Cluster(rollout_workers=3, gpus_per_worker=1, trainer_ranks=2)]
    ),
    st.integers(1, 3),
    st.sampled_from([None, 4096]),
)


@settings(max_examples=40)
@given(SETTINGS, st.integers(1, 200).map(lambda gib: gib * GIB))
def test_train_would_run_what_is_advised(run, device_bytes):
    demand = Demand(
        shape=LLAMA,
        slots=run.engine.slots,
        max_tokens=run.engine.max_tokens,
        prompt_tokens=256,
        pass_tokens=run.passes.micro_batch_tokens,
        precision="bfloat16",
        has_reference=True,
        cluster=run.cluster,
    )
    for change in advice(planned(demand), device_bytes, settings=run):
        if "parameters" in change.text:
            continue
        values = {}
        for part in change.text.split(" and "):
            key, _, text = part.partition(" = ")
            section, _, name = key.partition(".")
            values.setdefault(section, {})[name] = tomllib.loads(f"x = {text}")["x"]
        settings_over(run, values, path=Path("advised.toml"))
