"""Several GPUs: what a layout may be, what each GPU then holds, and what things cost."""

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from run_worlds import run_words, said
from sortedrl.config.cluster import Layout
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.config.train import Rollout, TrainSettings
from sortedrl.errors import ConfigError
from sortedrl.models.shape import KNOWN_SHAPES
from sortedrl.runs.plan.advice import advice
from sortedrl.runs.plan.cards import CARDS, Demand, card_named
from sortedrl.runs.plan.memory import Parts, planned
from sortedrl.runs.plan.page import RunPlan, lines
from sortedrl.runs.plan.prediction import predict
from sortedrl.simulate.costs import h100x8_qwen_2_5_32b

GIB = 1 << 30
LLAMA = KNOWN_SHAPES["meta-llama/Llama-3.1-8B"]
QWEN = KNOWN_SHAPES["Qwen/Qwen2.5-32B"]
HELD = ("weights", "masters", "moments", "gradients", "reference", "critic")
LAYOUTS = st.builds(
    lambda parallel, engines, offload: Layout(
        devices=2 * parallel * engines, tensor_parallel=parallel, offload=offload
    ),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 16),
    st.booleans(),
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
    layout=Layout(devices=8, tensor_parallel=8, offload=True),
)


def with_layout(demand, **changes):
    return replace(demand, layout=replace(demand.layout, **changes))


# --- memory ---------------------------------------------------------------------------------------


@given(DEMANDS, LAYOUTS)
def test_twice_the_devices_never_hold_more_each(demand, layout):
    demand = replace(demand, layout=layout)
    few, many = planned(demand), planned(with_layout(demand, devices=2 * layout.devices))
    for field in fields(Parts):
        if field.name != "rollout":  # the rest of the engine's pass over that of the update
            assert getattr(many.parts, field.name) <= getattr(few.parts, field.name), field.name
    assert many.parts.total <= few.parts.total
    assert many.least <= few.least


@given(DEMANDS, LAYOUTS)
def test_the_shares_of_all_devices_are_what_one_would_hold(demand, layout):
    alone = planned(demand).parts
    spread = planned(replace(demand, layout=replace(layout, offload=False))).parts
    for name in HELD:
        whole, share = getattr(alone, name), getattr(spread, name)
        assert whole <= layout.devices * share < whole + layout.devices, name
    offloaded = planned(replace(demand, layout=replace(layout, offload=True)))
    assert offloaded.parts.held == 0
    assert offloaded.host_bytes == alone.held
    assert offloaded.parts.total == spread.total - spread.held


@settings(max_examples=40)
@given(DEMANDS, LAYOUTS, st.integers(1, 400).map(lambda gib: gib * GIB))
def test_advice_for_several_devices_fits(demand, layout, device_bytes):
    plan = planned(replace(demand, layout=layout))
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


def test_advice_for_one_device_names_no_layout():
    plan = planned(replace(MATHS, layout=Layout()))
    assert not any("layout" in change.text for change in advice(plan, 80 * GIB))


def test_an_engine_is_spread_over_its_devices_and_no_head_is_cut():
    one, four, eight = (
        with_layout(MATHS, devices=16, tensor_parallel=parallel) for parallel in (1, 4, 8)
    )
    assert one.engine_bytes == 4 * four.engine_bytes == 8 * eight.engine_bytes
    assert one.cache_token_bytes == 4 * four.cache_token_bytes == 8 * eight.cache_token_bytes
    assert [demand.engine_slots for demand in (one, four, eight)] == [8, 32, 64]
    many = replace(MATHS, shape=replace(QWEN, heads=48), layout=Layout(devices=16))
    assert (
        with_layout(many, tensor_parallel=16).cache_token_bytes
        == with_layout(many, tensor_parallel=8).cache_token_bytes
    )
    with pytest.raises(ConfigError, match="must divide the 40 heads of the model, got 16"):
        with_layout(MATHS, devices=16, tensor_parallel=16)


def test_the_caches_of_all_engines_hold_as_many_tokens_as_there_is_room_for():
    for layout in (Layout(devices=8, tensor_parallel=8), Layout(devices=8, tensor_parallel=2)):
        plan = planned(replace(MATHS, layout=replace(layout, offload=True), slots=10_000))
        device = 80 * GIB
        whole = 8 * plan.cache_bytes(device) // QWEN.cache_token_bytes(2)
        assert plan.cache_tokens(device) == pytest.approx(whole, rel=1e-5)


def test_what_does_not_fit_on_eight_fits_offloaded_or_on_more():
    held = planned(with_layout(MATHS, offload=False))
    device = card_named("h100").memory_bytes
    assert not held.can_run(device)
    assert planned(MATHS).can_run(device)
    texts = [change.text for change in advice(held, device)]
    assert texts[:2] == ["layout.offload = true", "layout.devices = 32"]


# --- costs ----------------------------------------------------------------------------------------


def test_eight_cards_cost_what_the_simulator_has_for_them():
    ours = card_named("h100").costs(QWEN, number_bytes=2, layout=MATHS.layout)
    known = h100x8_qwen_2_5_32b()
    for name in ("cached_token_seconds", "prefill_token_seconds", "update_token_seconds"):
        assert getattr(ours, name) == pytest.approx(getattr(known, name), rel=0.01), name
    assert ours.weight_sync_seconds == pytest.approx(known.weight_sync_seconds, rel=0.01)
    assert ours.step_seconds == pytest.approx(known.step_seconds, rel=0.2)


@pytest.mark.parametrize("name", CARDS)
def test_one_card_costs_the_same_with_and_without_a_layout(name):
    card = card_named(name)
    costs = card.costs(LLAMA, number_bytes=2)
    assert costs == card.costs(LLAMA, number_bytes=2, layout=Layout())
    assert costs.weight_sync_seconds == 0
    assert card.pass_seconds(LLAMA, number_bytes=2, layout=Layout()) == 0


def predicted(demand):
    card = card_named("h100")
    return predict(
        planned(demand),
        Schedule(group_prompts=256, update_batch=64),
        card=card,
        device_bytes=card.memory_bytes,
        num_rows=512,
    )


def test_hours_follow_the_layout():
    small = replace(MATHS, shape=LLAMA, slots=64, layout=Layout(devices=8))
    eight = predicted(small)
    assert predicted(with_layout(small, devices=16)).hours < eight.hours
    # The host fetches and steps more slowly than eight GPUs do.
    assert predicted(with_layout(small, offload=True)).hours > eight.hours
    assert predicted(replace(small, has_critic=False)).hours < eight.hours
    assert eight.sync_goodput < eight.goodput


def test_short_passes_are_bound_by_the_weights_that_are_brought_together():
    long = replace(MATHS, max_tokens=256, slots=16)
    assert predicted(replace(long, pass_tokens=512)).hours > predicted(long).hours


# --- words ----------------------------------------------------------------------------------------


def test_the_page_says_what_one_of_several_devices_holds():
    card = card_named("h100")
    plan = RunPlan(
        card=card,
        device_bytes=card.memory_bytes,
        schedule=Schedule(),
        memory=planned(MATHS),
        prediction=None,
    )
    text = "\n".join(lines(plan))
    assert "devices    8 x NVIDIA H100" in text
    assert "layout     1 engine on 8 GPUs, the trainer on all; the host holds 1,086.9 GiB" in text
    assert "engine          7.6 GiB  the engine's own weights" in text
    assert "moments" not in text
    spread = replace(plan, memory=planned(with_layout(MATHS, tensor_parallel=2, offload=False)))
    text = "\n".join(lines(spread))
    assert "4 engines on 2 GPUs each" in text
    assert "cache " in text
    assert "32 slots of up to" in text


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"devices": 0}, "layout.devices must be at least 1, got 0"),
        ({"tensor_parallel": 0}, "layout.tensor_parallel must be at least 1, got 0"),
        ({"devices": 8, "tensor_parallel": 3}, r"must divide layout.devices \(8\).*got 3"),
        ({"tensor_parallel": 2}, r"must divide layout.devices \(1\)"),
        ({"offload": True}, "layout.offload needs layout.devices of at least 2"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        Layout(**values)


def test_settings_that_do_not_go_with_the_layout_are_refused():
    spread = Layout(devices=8, tensor_parallel=2)
    with pytest.raises(ConfigError, match=r"needs rollout\.engine 'vllm'.*'native'"):
        TrainSettings(layout=spread)
    with pytest.raises(ConfigError, match=r"all 4 engines together.*at least as many, got 3"):
        TrainSettings(layout=spread, rollout=Rollout(engine="vllm"), engine=EngineSettings(slots=3))
    TrainSettings(layout=Layout(devices=8))
    TrainSettings(layout=spread, rollout=Rollout(engine="sglang"))


@pytest.mark.usefixtures("here")
def test_a_run_on_several_gpus_is_planned_and_not_begun(capsys, tmp_path):
    words = run_words(tmp_path / "run", "--layout.devices", "2", model="tiny")
    _, err = said(capsys, words, code=2)
    assert "one process trains on one GPU, got layout.devices 2" in err
    assert not (tmp_path / "run").exists()
    out, _ = said(capsys, [*words, "--dry-run", "--card", "a100"])
    assert "2 engines on 1 GPU each, the trainer on all" in out


@pytest.mark.usefixtures("here")
def test_a_colocated_cluster_is_planned_as_a_layout_and_a_separated_one_is_not(capsys, tmp_path):
    cluster = ["--cluster.rollout-workers", "2", "--cluster.trainer-ranks", "2"]
    words = run_words(tmp_path / "run", *cluster, "--cluster.gpus-per-worker", "1", model="tiny")
    plan = [*words, "--dry-run", "--card", "a100"]
    out, err = said(capsys, [*plan, "--cluster.kind", "colocated"])
    assert "2 engines on 1 GPU each, the trainer on all" in out
    assert "not planned" not in err
    out, err = said(capsys, plan)
    assert "the trainer on all" not in out
    assert "[cluster] is not planned: this is the plan of one device" in err
