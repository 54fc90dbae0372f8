"""The dry run: memory against real models and the engine, advice that fits, predicted numbers."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from run_worlds import run_words, said
from sortedrl.config.algorithm import Algorithm, Optimisation
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.config.train import PassSettings, TrainSettings
from sortedrl.engines.native import NativeEngine
from sortedrl.errors import ConfigError
from sortedrl.models.shape import Shape, shape_of, shape_of_config
from sortedrl.runs import build_training
from sortedrl.runs.plan.cards import BLOCK_TOKENS, CARDS, Demand, card_named
from sortedrl.runs.plan.dry_run import Expected, card_of, planned_run, run_memory
from sortedrl.runs.plan.memory import planned
from sortedrl.runs.plan.page import RunPlan, advice, lines, refuse_too_big, to_json
from sortedrl.runs.plan.prediction import guessed_lengths, predict
from sortedrl.runs.start import train
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.conversations import ConversationSettings
from sortedrl.simulate.costs import CostSettings
from sortedrl.simulate.lengths import LengthSettings
from sortedrl.simulate.settings import Simulation
from sortedrl.training.optimiser import Optimiser

torch.set_num_threads(1)

GIB = 1 << 30
SMOLLM = Shape(
    name="smollm2-135m",
    parameters=134_515_008,
    layers=30,
    hidden=576,
    inner=1536,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocabulary=49152,
    context=8192,
    is_tied=True,
    linear_width=305_280,
)
LLAMA = Shape(
    name="llama-3.1-8b",
    parameters=8_030_261_248,
    layers=32,
    hidden=4096,
    inner=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=128256,
    context=131072,
    is_tied=False,
    linear_width=2_621_440,
)
SMALL = Demand(
    shape=SMOLLM,
    slots=32,
    max_tokens=1024,
    prompt_tokens=128,
    pass_tokens=4096,
    precision="bfloat16",
)
DEMANDS = st.builds(
    Demand,
    shape=st.sampled_from([SMOLLM, LLAMA]),
    slots=st.integers(1, 256),
    max_tokens=st.integers(1, 16384),
    prompt_tokens=st.integers(1, 2048),
    pass_tokens=st.integers(1, 32768),
    precision=st.sampled_from(["float32", "bfloat16"]),
    is_gpu=st.booleans(),
    has_reference=st.booleans(),
    has_critic=st.booleans(),
    lora_rank=st.sampled_from([None, 8]),
    gradient_checkpointing=st.booleans(),
    optimiser_state=st.sampled_from(["fp32", "8bit", "offload"]),
    gradients=st.sampled_from(["fp32", "weights"]),
)
DEVICES = st.integers(1, 400).map(lambda gib: gib * GIB)


def tiny_llama(**changes):
    sizes = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes)))


def demand_of(model, **changes):
    shape = shape_of_config(model.config, name="made here")
    sizes = {"slots": 3, "max_tokens": 100, "prompt_tokens": 28, "pass_tokens": 128}
    return Demand(shape=shape, **(sizes | {"precision": "float32", "is_gpu": False} | changes))


@given(DEMANDS, DEVICES)
def test_parts_add_up_and_the_least_is_part_of_all(demand, device):
    plan = planned(demand)
    parts = plan.parts
    assert parts.total == parts.trainer + parts.generation + parts.cache == plan.total
    assert plan.least <= plan.total
    assert 0 <= plan.cache_bytes(device) <= parts.cache
    assert plan.can_run(device) == (plan.least <= plan.usable(device) < device)


@given(DEMANDS)
def test_more_work_never_takes_less_memory(demand):
    total, least = planned(demand).parts.total, planned(demand).least
    for field in ("slots", "max_tokens", "pass_tokens"):
        more = planned(replace(demand, **{field: 2 * getattr(demand, field)}))
        assert more.parts.total >= total
        assert more.least >= least
    assert planned(replace(demand, has_reference=True, has_critic=True)).parts.total >= total
    copied = planned(replace(demand, has_engine_copy=True)).parts
    assert copied.total - total == demand.shape.parameters * demand.number_bytes
    assert planned(replace(demand, gradient_checkpointing=True)).parts.total <= total


@given(DEMANDS, DEVICES)
def test_there_is_advice_exactly_where_a_run_does_not_fit_and_it_fits(demand, device):
    plan = planned(demand)
    changes = advice(plan, device)
    assert not (changes and plan.can_run(device))
    for change in changes:
        assert planned(change.demand).can_run(device), change.text
        assert change.least <= plan.usable(device)
        assert change.demand != demand


def one_step_more(found, demand):
    """The lowered numbers of a demand a step higher; `None` if that is no longer lower."""
    before = {"pass_tokens": demand.pass_tokens, "max_tokens": demand.max_tokens}
    steps = {name: getattr(found, name) + 64 for name in before}
    lowered = {name: step for name, step in steps.items() if step - 64 < before[name]}
    if not lowered or any(step > before[name] for name, step in lowered.items()):
        return None
    return replace(found, **lowered)


@given(DEMANDS, DEVICES)
def test_advised_numbers_are_as_large_as_they_can_be(demand, device):
    for change in advice(planned(demand), device):
        more = one_step_more(change.demand, demand)
        if change.demand.shape == demand.shape and more is not None:
            assert not planned(more).can_run(device), change.text


def test_weights_and_optimiser_are_those_of_a_real_model():
    model = tiny_llama()
    optimiser = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    optimiser.step()
    parts = planned(demand_of(model)).parts
    assert parts.weights == sum(p.numel() * p.element_size() for p in model.parameters())
    assert parts.gradients == sum(p.grad.numel() * 4 for p in model.parameters())
    states = optimiser.state.values()
    moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
    assert parts.moments == sum(moment.numel() * moment.element_size() for moment in moments)
    assert parts.masters == 0
    assert planned(demand_of(model, precision="bfloat16")).parts.masters == parts.weights


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("state", ["fp32", "8bit", "offload"])
@pytest.mark.parametrize("gradients", ["fp32", "weights"])
def test_the_state_of_the_optimiser_is_that_of_a_real_one(state, gradients, precision):
    model = tiny_llama(hidden_size=64, intermediate_size=256, vocab_size=512)
    demand = demand_of(model, optimiser_state=state, gradients=gradients, precision=precision)
    model.to({"float32": torch.float32, "bfloat16": torch.bfloat16}[precision])
    settings = Optimisation(state=state, gradients=gradients)
    optimiser = Optimiser(dict(model.named_parameters()), settings, total_steps=None)
    model(torch.tensor([[1, 2, 3]])).logits.float().sum().backward()
    plan = planned(demand)
    parts, pieces = plan.parts, 0 if state == "fp32" else 36 * demand.shape.parameters
    held = sum(tensor.nbytes for tensor in optimiser._state.on_device())
    assert parts.masters + parts.moments - pieces == pytest.approx(held, rel=0.03)
    own = sum(gradient.nbytes for gradient in optimiser.gradients().values())
    assert parts.gradients == own
    in_main_memory = sum(t.nbytes for t in optimiser.state()[0].values())
    assert plan.host_bytes == (in_main_memory if state == "offload" else 0)


def test_on_one_card_8b_is_trained_whole_with_a_smaller_state():
    def plan(**changes):
        return planned(
            Demand(
                shape=LLAMA,
                slots=128,
                max_tokens=8192,
                prompt_tokens=192,
                pass_tokens=8704,
                precision="bfloat16",
                gradient_checkpointing=True,
                **changes,
            )
        )

    card = card_named("h200")
    assert not plan().can_run(card.memory_bytes)
    for state, gradients, cache in (
        ("8bit", "fp32", 25),
        ("8bit", "weights", 40),
        ("offload", "fp32", 70),
        ("offload", "weights", 85),
    ):
        chosen = plan(optimiser_state=state, gradients=gradients)
        assert chosen.can_run(card.memory_bytes)
        assert chosen.cache_bytes(card.memory_bytes) > cache * GIB
    assert 89 * GIB < plan(optimiser_state="offload").host_bytes < 91 * GIB
    texts = [change.text for change in advice(plan(), card.memory_bytes)]
    assert 'optimiser.state = "8bit"' in texts
    assert 'optimiser.state = "offload"' in texts


def test_the_critic_has_all_but_the_output_layer_trained():
    model = tiny_llama(tie_word_embeddings=False)
    demand = demand_of(model, has_critic=True)
    trained = sum(p.numel() for p in model.model.parameters())
    head = 32 + 1
    assert planned(demand).parts.critic == 4 * demand.shape.parameters + 12 * trained + 16 * head


def test_adapters_have_the_numbers_that_peft_gives_them():
    peft = pytest.importorskip("peft")
    model = tiny_llama()
    demand = demand_of(model, lora_rank=5, has_reference=True)
    model.add_adapter(peft.LoraConfig(r=5, target_modules="all-linear"))
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert demand.adapter_parameters == demand.trained_parameters == adapters
    parts = planned(demand).parts
    assert (parts.gradients, parts.moments) == (4 * adapters, 8 * adapters)
    assert parts.reference == 0


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("max_tokens", [100, 70])
def test_the_cache_is_that_of_the_engine(slots, max_tokens):
    prompt_tokens = 28
    model = tiny_llama(max_position_embeddings=prompt_tokens + max_tokens)
    demand = demand_of(model, slots=slots, max_tokens=max_tokens, prompt_tokens=prompt_tokens)
    engine = NativeEngine(model, slots=slots, block_tokens=BLOCK_TOKENS)
    assert planned(demand).parts.cache == engine.cache.bytes
    least = NativeEngine(
        model, slots=slots, block_tokens=BLOCK_TOKENS, cache_bytes=demand.least_cache_bytes
    )
    assert least.cache.tokens >= demand.sequence_tokens


@pytest.mark.parametrize(
    "model",
    [
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=144,
                intermediate_size=384,
                num_hidden_layers=8,
                num_attention_heads=9,
                num_key_value_heads=3,
            )
        ),
        Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=64,
                hidden_size=128,
                intermediate_size=512,
                num_hidden_layers=8,
                num_attention_heads=8,
                num_key_value_heads=2,
            )
        ),
    ],
    ids=["llama", "qwen2"],
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_activations_are_what_a_pass_keeps(model, precision):
    model = model.to(getattr(torch, precision)).train()
    tokens, weights = 128, {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(torch.ones(1, tokens, dtype=torch.long))
    measured = sum(num_bytes for num_bytes, _ in kept.values())
    demand = demand_of(
        model, precision=precision, max_tokens=1, prompt_tokens=1, pass_tokens=tokens
    )
    # The plan counts one layer more, as working memory.
    expected = planned(demand).parts.activations * 8 / 9
    assert measured == pytest.approx(expected, rel=0.1)


def test_a_pass_is_at_least_as_long_as_the_longest_answer():
    short, exact = (
        planned(replace(SMALL, pass_tokens=tokens))
        for tokens in (1, SMALL.prompt_tokens + SMALL.max_tokens)
    )
    assert short.parts.activations == exact.parts.activations


def test_a_pass_holds_no_more_than_all_open_groups():
    def pass_tokens(lookahead=0, **given):
        schedule = Schedule(
            group_prompts=8,
            samples_per_prompt=8,
            update_batch=16,
            lookahead=lookahead,
            harvest_unit="prompt",
        )
        engine = EngineSettings(slots=16, max_tokens=32)
        settings = TrainSettings(schedule=schedule, engine=engine, **given)
        return run_memory(settings, SMOLLM, is_gpu=False, prompt_tokens=50).demand.pass_tokens

    assert pass_tokens() == 64 * 82
    assert pass_tokens(lookahead=1) == 2 * 64 * 82
    assert pass_tokens(lookahead=9) == PassSettings().micro_batch_tokens
    # Dynamic sampling holds answers back for the next update.
    assert pass_tokens(algorithm=Algorithm(name="dapo")) == (64 + 16) * 82


def test_a_model_too_big_is_refused_with_what_would_fit():
    demand = Demand(
        shape=LLAMA,
        slots=128,
        max_tokens=8192,
        prompt_tokens=512,
        pass_tokens=16384,
        precision="bfloat16",
    )
    plan = planned(demand)
    device = 80 * GIB
    with pytest.raises(ConfigError, match=r"lora\.rank = 16") as caught:
        refuse_too_big(plan, device)
    assert "gradient_checkpointing = true and" in str(caught.value)
    assert "a model of about 1." in str(caught.value)
    refuse_too_big(plan, 4000 * GIB)


LONG = TrainSettings(
    model="tiny:context=65536",
    task="knights_knaves:people=3,count=8,style=compact",
    device="cpu",
    engine=EngineSettings(slots=2, max_tokens=60_000),
)


def test_answers_longer_than_a_pass_that_does_not_fit_are_refused_before_a_model_is_loaded(
    monkeypatch, tmp_path
):
    said_once = r"a pass holds the 60,\d+ tokens of the longest prompt and answer.*what would fit: "
    plan = planned_run(
        LONG,
        [],
        card_name="cpu",
        expected=Expected(rows=8, prompt_tokens=18, memory_gib=2),
        tell=lambda words: None,
    )
    with pytest.raises(ConfigError, match=said_once) as planned_error:
        refuse_too_big(plan.memory, plan.device_bytes, settings=LONG)
    monkeypatch.setattr(build_training, "device_memory", lambda device: (2 * GIB, 2 * GIB))
    monkeypatch.setattr(build_training, "trained_model", None)
    with pytest.raises(ConfigError, match=said_once) as error:
        train(replace(LONG, out=tmp_path / "run"))
    assert "passes.gradient_checkpointing = true" in str(error.value)
    assert str(error.value).partition("what")[2] == str(planned_error.value).partition("what")[2]


def test_one_change_is_enough_where_one_is():
    demand = replace(SMALL, pass_tokens=16384, max_tokens=4096)
    plan = planned(demand)
    texts = [change.text for change in advice(plan, 10 * GIB)]
    assert "passes.gradient_checkpointing = true" in texts
    assert any(text.startswith("passes.micro_batch_tokens = ") for text in texts)
    assert not any(" and " in text for text in texts)


def test_a_prompt_that_leaves_no_room_in_the_context_is_refused():
    with pytest.raises(ConfigError, match="context of 8,192"):
        replace(SMALL, prompt_tokens=8192)


def test_a_smaller_cache_than_the_slots_can_fill_is_enough_to_run():
    plan = planned(replace(SMALL, shape=LLAMA, lora_rank=16, slots=256, max_tokens=8192))
    device = 80 * GIB
    assert plan.can_run(device)
    assert plan.demand.least_cache_bytes <= plan.cache_bytes(device) < plan.parts.cache
    given = replace(plan.demand, cache_bytes=2 * GIB)
    assert planned(given).parts.cache == planned(given).cache_bytes(device) == 2 * GIB


@pytest.mark.parametrize("rows", [1, 100, 1000])
@pytest.mark.parametrize("epochs", [1, 2])
def test_the_course_of_sync_is_counted_by_hand(rows, epochs):
    schedule = Schedule(strategy="sync", group_prompts=64, update_batch=50)
    course = predicted(SMALL, schedule=schedule, num_rows=rows, epochs=epochs).schedule
    prompts = rows * epochs
    assert course.prompts == course.trajectories == prompts
    assert course.rounds == course.updates == course.groups == -(-prompts // 50)
    assert course.updates_per_epoch == pytest.approx(course.updates / epochs)
    assert (course.rounds_bound, course.staleness_bound) == (1, 0)


def test_what_is_beyond_the_first_groups_goes_on_like_them():
    schedule = Schedule(group_prompts=32, samples_per_prompt=2, update_batch=16, lookahead=1)
    engine = EngineSettings(slots=16, max_tokens=256)
    demand = replace(SMALL, slots=16, max_tokens=256)
    course = predicted(demand, schedule=schedule, num_rows=320).schedule
    assert course.is_extrapolated
    whole = simulate(
        Simulation(
            prompts=320,
            schedule=schedule,
            engine=engine,
            lengths=guessed_lengths(256),
            costs=CostSettings(hardware="ticks"),
        )
    ).metrics
    assert course.groups == len(whole.groups) == 10
    assert course.updates == pytest.approx(whole.run.updates, rel=0.1)
    assert course.rounds == pytest.approx(len(whole.rounds), rel=0.1)
    assert (course.rounds_bound, course.staleness_bound) == (12, 11)


def test_a_run_that_is_stopped_is_shorter():
    schedule = Schedule(group_prompts=64, update_batch=16)
    whole = predicted(SMALL, schedule=schedule, num_rows=640).schedule
    stopped = predicted(SMALL, schedule=schedule, num_rows=640, max_updates=whole.updates // 2)
    half = stopped.schedule
    assert half.updates == whole.updates // 2
    assert half.prompts == pytest.approx(whole.prompts / 2, rel=0.05)
    assert half.updates_per_epoch == whole.updates_per_epoch
    never = predicted(SMALL, schedule=schedule, num_rows=640, max_updates=10**6)
    assert never.schedule == whole


@pytest.mark.parametrize(
    ("card", "shape", "slots", "context", "measured"),
    [
        ("h200", SMOLLM, 256, 320, 105_995),
        (
            "h200",
            replace(SMOLLM, parameters=1_543_714_304, layers=28, kv_heads=2, head_dim=128),
            256,
            1088,
            50_213,
        ),
        ("cpu", replace(SMOLLM, parameters=88_000_000, layers=10, kv_heads=12), 32, 76, 204),
    ],
)
def test_cards_decode_about_as_fast_as_was_measured(card, shape, slots, context, measured):
    costs = card_named(card).costs(shape, number_bytes=2 if card == "h200" else 4)
    seconds = costs.step_seconds + slots * (
        costs.sequence_seconds + context * costs.cached_token_seconds
    )
    assert slots / seconds == pytest.approx(measured, rel=0.35)


def test_an_unknown_card_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        card_named("h10")
    for make in CARDS.values():
        assert make().is_gpu == (make().memory_bytes is not None)


def predicted(demand, **changes):
    card = card_named("h100")
    schedule = changes.pop("schedule", Schedule(group_prompts=64, update_batch=32))
    settings = {"card": card, "device_bytes": card.memory_bytes, "num_rows": 256} | changes
    return predict(planned(demand), schedule, **settings)


def test_a_prediction_is_what_the_simulator_says():
    lengths = LengthSettings(median=200, sigma=0.5, prompt_tokens=128)
    found = predicted(SMALL, lengths=lengths)
    assert not found.are_lengths_guessed
    assert found.mean_length == pytest.approx(200 * 1.133, rel=0.05)
    assert 0 < found.bubble < found.sync_bubble < 1
    assert found.hours < found.sync_hours
    assert found.goodput > found.trained_per_second
    tokens = found.mean_length * found.schedule.trajectories
    assert tokens / found.trained_per_second / 3600 == pytest.approx(found.hours, rel=0.1)
    assert predicted(SMALL).are_lengths_guessed


def test_a_conversation_run_is_predicted_with_its_turns_and_tool_times():
    def talked(**changes):
        usual = {"turns": 4.0, "turns_sigma": 0.0, "tool_seconds": 1.0, "given_tokens": 50.0}
        return predicted(SMALL, conversations=ConversationSettings(**(usual | changes)))

    usual = talked()
    assert usual.conversations.turns == pytest.approx(4, abs=0.02)
    assert 0 < usual.conversations.outside_bubble <= usual.bubble
    assert usual.hours > predicted(SMALL).hours
    assert predicted(SMALL).conversations is None
    assert usual.mean_length == pytest.approx(predicted(SMALL).mean_length, rel=0.35)
    slow = talked(tool_seconds=60.0)
    assert slow.hours > usual.hours
    limited = talked(tool_seconds=60.0, max_tool_seconds=2.0)
    assert limited.conversations.reply_seconds <= 2.0
    assert limited.hours < slow.hours
    cut = talked(turns=40.0, max_turns=2)
    assert cut.conversations.turns == pytest.approx(2, abs=0.02)
    assert not usual.conversations.fills_context
    assert talked(given_tokens=1e6).conversations.fills_context


def test_hours_grow_with_the_work():
    once = predicted(SMALL)
    assert predicted(SMALL, epochs=4).hours == pytest.approx(4 * once.hours, rel=0.1)
    assert predicted(replace(SMALL, has_critic=True)).hours > once.hours
    assert predicted(replace(SMALL, has_reference=True)).hours > once.hours
    assert predicted(replace(SMALL, gradient_checkpointing=True)).hours > once.hours
    assert predicted(SMALL, batch_epochs=2).hours > once.hours
    assert predicted(SMALL, has_first_pass=True).hours > once.hours
    assert predicted(replace(SMALL, lora_rank=8)).hours < once.hours
    assert predicted(SMALL, max_updates=4).hours == pytest.approx(once.hours / 2, rel=0.2)


def test_a_cache_without_room_for_all_slots_leaves_some_of_them_empty():
    least = SMALL.least_cache_bytes
    few = predicted(replace(SMALL, cache_bytes=4 * least))
    assert 4 <= few.slots < SMALL.slots == predicted(SMALL).slots
    assert few.hours > predicted(SMALL).hours


def test_guessed_lengths_have_the_mean_that_is_given():
    assert guessed_lengths(8192).median == pytest.approx(1097)
    settings = guessed_lengths(10**9, mean=300, prompt_tokens=9)
    assert settings.median * 2.718281828**0.5 == pytest.approx(300)
    assert settings.prompt_tokens == 9
    with pytest.raises(ConfigError, match="mean length must be positive"):
        guessed_lengths(10, mean=0)


def page_of(demand, *, device_bytes, schedule=None):
    schedule = schedule or Schedule(group_prompts=64, update_batch=32)
    memory, card = planned(demand), card_named("h100")
    prediction = None
    if memory.can_run(device_bytes):
        prediction = predict(memory, schedule, card=card, device_bytes=device_bytes, num_rows=512)
    return RunPlan(
        card=card,
        device_bytes=device_bytes,
        settings=TrainSettings(schedule=schedule),
        memory=memory,
        prediction=prediction,
    )


def test_the_page_of_a_run_that_fits_has_memory_course_and_hours():
    plan = page_of(SMALL, device_bytes=80 * GIB)
    text = "\n".join(lines(plan))
    for words in (
        "134.5 M parameters in bfloat16",
        "weights       256.6 MiB",
        "no token is more than 1 version old",
        "trained within 2 rounds",
        "about 8 groups",
        "(sync: ",
        "long-tailed: a guess; measure some",
    ):
        assert words in text
    assert "reference" not in text
    assert plan.fits
    assert json.loads(json.dumps(to_json(plan)))["fits"] is True


def test_the_page_of_a_run_that_does_not_fit_says_what_would():
    plan = page_of(replace(SMALL, shape=LLAMA), device_bytes=80 * GIB)
    text = "\n".join(lines(plan))
    assert "It does not fit. Changes that would make it fit:" in text
    assert "lora.rank = 16" in text
    assert "predicted" not in text
    found = json.loads(json.dumps(to_json(plan)))
    assert (found["fits"], found["prediction"]) == (False, None)
    assert found["advice"]


def test_the_page_says_where_the_context_or_the_cache_is_too_small():
    long = replace(SMALL, max_tokens=8192, slots=256)
    assert "it has room for 8,064 tokens, not for 8,192" in "\n".join(
        lines(page_of(long, device_bytes=80 * GIB))
    )
    text = "\n".join(lines(page_of(long, device_bytes=20 * GIB)))
    assert "slots at their longest" in text
    assert "the cache has room for about" in text


def test_schedules_without_bounds_say_so():
    plan = page_of(
        SMALL,
        device_bytes=80 * GIB,
        schedule=Schedule(strategy="ungrouped", group_prompts=64, update_batch=32),
    )
    assert "none on how long a prompt waits" in "\n".join(lines(plan))
    sync = Schedule(strategy="sync", group_prompts=64, update_batch=32)
    assert "no token is stale" in "\n".join(
        lines(page_of(SMALL, device_bytes=80 * GIB, schedule=sync))
    )


def test_the_shapes_used_here_are_those_of_their_models():
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    assert shape_of_config(config, name=SMOLLM.name) == SMOLLM
    assert shape_of("tiny").is_tied


def test_planning_needs_no_torch_until_a_model_is_looked_at():
    code = (
        "import sys, sortedrl.runs.plan.page, sortedrl.models.shape, sortedrl.models.tiny;"
        "sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- the card that is here ------------------------------------------------------------------------


def test_a_card_whose_speed_is_not_known_is_refused_with_its_memory():
    assert card_of("NVIDIA H100 80GB HBM3", 80 * GIB) == card_named("h100")
    with pytest.raises(ConfigError, match=r"speed of NVIDIA L40S is not known.*--memory-gib 44"):
        card_of("NVIDIA L40S", 44 * GIB)


@pytest.mark.usefixtures("here")
def test_a_card_can_have_other_memory(capsys, tmp_path):
    words = [*run_words(tmp_path / "run", model="tiny"), "--dry-run", "--memory-gib", "44"]
    out, _ = said(capsys, [*words, "--card", "a100"])
    assert "of 44.0 GiB usable" in out
    _, err = said(capsys, words, code=2)
    assert "--memory-gib is the memory of --card, got 44.0 without one" in err
