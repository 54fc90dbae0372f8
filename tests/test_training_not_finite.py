"""Numbers that are not finite: one answer, one model or one update must not spoil the rest."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from native_worlds import VOCABULARY, tiny_model
from sortedrl.config.algorithm import Algorithm, Correction, CorrectionName, Optimisation
from sortedrl.config.schedule import Schedule
from sortedrl.errors import CheckpointError, ModelError, TrainingError
from sortedrl.training.advantages import RunningMoments
from sortedrl.training.checkpoint import save
from sortedrl.training.forward import PackedModel
from sortedrl.training.lora import export_model
from sortedrl.training.losses import bounded_ratios, correction_weights
from sortedrl.types import LARGEST_REWARD, Segment, TrainBatch, impossible_logprob
from training_worlds import train_settings, trainer_of, written

LENGTHS = (5, 9, 3, 12, 7, 1)


class NoTokenizer:
    """What the export of a model without text needs."""

    def save_pretrained(self, folder):
        Path(folder).mkdir(exist_ok=True)


def settings_of(algorithm=None, **changes):
    algorithm = algorithm or Algorithm(whiten="group")
    samples = 2 if algorithm.needs_siblings else 1
    schedule = Schedule(
        group_prompts=8,
        samples_per_prompt=samples,
        update_batch=4,
        harvest_unit="prompt" if samples > 1 else "trajectory",
    )
    return train_settings(schedule=schedule, algorithm=algorithm, **changes)


def trained(batches, *, settings=None):
    """A trainer after these updates, and its model."""
    model = tiny_model(std=0.3)
    trainer = trainer_of(model, settings or settings_of())
    for answers in batches:
        trainer.update(TrainBatch(trainer.version, tuple(answers)))
    return trainer, model


def answers(*, seed=0, samples=1):
    return written(tiny_model(std=0.3), LENGTHS, seed=seed, samples=samples)


def with_logprob(answer, place, value):
    (segment,) = answer.segments
    logprobs = [*segment.logprobs]
    logprobs[place] = value
    return replace(answer, segments=(Segment(segment.tokens, logprobs, segment.version),))


def same_weights(first, second):
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


# --- an answer ------------------------------------------------------------------------------------

SPOILT = {
    "NaN reward": lambda answer: replace(answer, reward=math.nan),
    "infinite reward": lambda answer: replace(answer, reward=-math.inf),
    "huge reward": lambda answer: replace(answer, reward=1e300),
    "NaN log-probability": lambda answer: with_logprob(answer, 2, math.nan),
    "impossible token": lambda answer: with_logprob(answer, 0, -math.inf),
    "stand-in for minus infinity": lambda answer: with_logprob(answer, 0, -9999.0),
    "more than certain": lambda answer: with_logprob(answer, 1, 0.5),
}


@pytest.mark.parametrize("algorithm", [Algorithm(whiten="group"), Algorithm(name="grpo")])
@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_an_answer_that_is_not_finite_is_left_out_and_named(spoil, algorithm, caplog):
    settings = settings_of(algorithm)
    first, second = (answers(seed=seed, samples=2) for seed in (0, 1))
    spoilt = [*first[:3], spoil(first[3]), *first[4:]]
    with caplog.at_level(logging.WARNING):
        trainer, model = trained([spoilt, second], settings=settings)
    (record,) = caplog.records
    assert "1 of 6 answers are left out of the update (prompt 1, sample 1: " in record.message
    other, expected = trained([[*first[:3], *first[4:]], second], settings=settings)
    assert same_weights(model, expected)
    assert trainer.version == other.version == 2
    if trainer.moments is not None:
        assert trainer.moments.state() == other.moments.state()


def test_answers_that_are_left_out_are_counted():
    spoilt = [replace(answer, reward=math.nan) for answer in answers()]
    trainer, _ = trained([[*spoilt[:2], *answers()[2:]]])
    assert trainer.last["unusable_answers"] == 2
    assert trainer.last["skipped_steps"] == 0
    trainer.update(TrainBatch(1, tuple(answers(seed=1))))
    assert "unusable_answers" not in trainer.last


def test_updates_without_a_usable_answer_stop_the_run_in_the_end():
    settings = settings_of(optimiser=Optimisation(learning_rate=0.01, max_bad_updates=2))
    spoilt = [replace(answer, reward=math.inf) for answer in answers()]
    trainer, model = trained([spoilt], settings=settings)
    assert (trainer.version, trainer.num_bad) == (0, 1)
    assert trainer.last == {"unusable_answers": 6.0}
    with pytest.raises(TrainingError, match=r"2 updates in a row.*no answer of the update can be"):
        trainer.update(TrainBatch(0, tuple(spoilt)))
    assert same_weights(model, tiny_model(std=0.3))


@pytest.mark.parametrize("name", ["reinforce_pp", "grpo", "dr_grpo", "rloo", "ppo"])
def test_the_largest_reward_still_gives_finite_numbers(name):
    settings = settings_of(Algorithm(name=name))
    rewards = [LARGEST_REWARD, -LARGEST_REWARD, 0.0, 1.0, LARGEST_REWARD, 2.0]
    batch = [replace(a, reward=r) for a, r in zip(answers(samples=2), rewards, strict=True)]
    trainer, model = trained([batch], settings=settings)
    assert trainer.version == 1
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_only_what_a_sampled_token_can_have_is_a_log_probability():
    assert impossible_logprob([-1e-9, 0.0, 1e-6, -700.0]) is None
    assert impossible_logprob([]) is None
    for value in (None, math.nan, math.inf, -math.inf, 1.0, -9999.0):
        assert impossible_logprob([-1.0, value]) == 1


def test_a_window_forgets_values_that_are_not_finite():
    moments, untouched = RunningMoments(3), RunningMoments(3)
    values = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    for one in (moments, untouched):
        one.whitened(values, floor=1e-6)
    for poison in (math.nan, math.inf):
        assert not moments.whitened(values * poison, floor=1e-6).isfinite().any()
    assert moments.state() == untouched.state()
    one, other = (m.whitened(values + 1, floor=1e-6) for m in (moments, untouched))
    assert torch.equal(one, other)


# --- a model --------------------------------------------------------------------------------------


def break_token(model, token):
    """Spoil what the model makes of one token."""
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = math.nan


def only_in(batch, chosen):
    """A token that the model reads in this answer and in no other."""

    def read(answer):
        return {*answer.prompt.tokens, *answer.tokens[:-1]}

    others = set().union(*(read(a) for a in batch if a is not chosen))
    return min(read(chosen) - others)


def test_an_update_whose_log_probabilities_are_not_finite_is_skipped_and_the_answer_named(caplog):
    trainer, model = trained([])
    batch = answers()
    break_token(model, only_in(batch, batch[3]))
    before = [parameter.clone() for parameter in model.parameters()]
    with caplog.at_level(logging.WARNING):
        trainer.update(TrainBatch(0, tuple(batch)))
    (record,) = caplog.records
    assert "update skipped" in record.message
    assert "1 of 6 answers, the first for prompt 3, sample 0" in record.message
    assert (trainer.version, trainer.num_bad) == (0, 1)
    for was, parameter in zip(before, model.parameters(), strict=True):
        assert was.nan_to_num(7).equal(parameter.nan_to_num(7))


MODELS = {
    "the reference": (Algorithm(kl_coef=0.1, whiten="group"), lambda t: t._reference._packed.model),
    "the critic": (Algorithm(name="ppo"), lambda t: t.critic.critic.trunk),
    "the trained model": (Algorithm(kl_coef=0.1, whiten="group"), lambda t: t._policy.model),
}


@pytest.mark.parametrize(("what", "algorithm", "broken"), [(n, *m) for n, m in MODELS.items()])
def test_a_model_that_gives_no_numbers_is_named_and_spoils_no_window(
    what, algorithm, broken, caplog
):
    trainer, _ = trained([], settings=settings_of(algorithm))
    batch = answers()
    break_token(broken(trainer), only_in(batch, batch[1]))
    with caplog.at_level(logging.WARNING):
        trainer.update(TrainBatch(0, tuple(batch)))
    assert f"{what} gave values that are not finite for 1 of 6 answers" in caplog.text
    assert "prompt 1, sample 0" in caplog.text
    assert trainer.last["skipped_steps"] == 1
    assert (trainer.version, trainer.num_bad) == (0, 1)
    assert trainer.moments is None or trainer.moments.state() == []


def test_a_model_whose_weights_are_not_finite_is_refused_by_the_name_of_the_weights():
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[0] = math.inf
    with pytest.raises(ModelError, match=r"its weights model.norm.weight hold NaN or infinite"):
        PackedModel(model)


# --- float16 --------------------------------------------------------------------------------------


def half_trainer(scale, **changes):
    model = tiny_model(std=0.3).to(torch.float16)
    trainer = trainer_of(model, settings_of(**changes))
    trainer.optimiser._scale.load_state([scale, 0])
    return trainer, model


@pytest.mark.parametrize("algorithm", [Algorithm(), Algorithm(name="ppo"), Algorithm(kl_coef=0.1)])
def test_an_update_in_float16_that_overflows_is_made_again_and_not_lost(algorithm):
    batch = TrainBatch(0, tuple(answers()))
    trainer, model = half_trainer(2.0**24, algorithm=algorithm, learning_rate=1e-3)
    trainer.update(batch)
    scale = trainer.last["loss_scale"]
    assert 1 <= scale < 2.0**24, "it overflowed at first"
    assert (trainer.version, trainer.num_bad, trainer.last["skipped_steps"]) == (1, 0, 0)
    other, expected = half_trainer(scale, algorithm=algorithm, learning_rate=1e-3)
    other.update(batch)
    assert same_weights(model, expected)
    times = {"update_seconds"}
    numbers = {name: value for name, value in trainer.last.items() if name not in times}
    assert numbers == {name: value for name, value in other.last.items() if name not in times}


def test_a_run_in_float16_goes_on_from_its_checkpoint_bit_for_bit(tmp_path):
    batches = [TrainBatch(version, tuple(answers(seed=version))) for version in range(4)]
    trainer, model = half_trainer(2.0**24, learning_rate=1e-3)
    for batch in batches[:2]:
        trainer.update(batch)
    counters = {}

    def write(folder):
        counters.update(trainer.save(folder, tokenizer=NoTokenizer()))

    save(tmp_path / "one", write)
    resumed, again = half_trainer(2.0**16, learning_rate=1e-3)
    again.load_state_dict(model.state_dict())
    resumed.load(tmp_path / "one", counters)
    for batch in batches[2:]:
        trainer.update(batch)
        resumed.update(batch)
    assert resumed.last["loss_scale"] == trainer.last["loss_scale"]
    assert same_weights(model, again)


# --- what is saved --------------------------------------------------------------------------------


def test_weights_that_are_not_finite_are_never_saved_over_good_ones(tmp_path):
    trainer, model = trained([answers()])

    def write(folder):
        trainer.save(folder, tokenizer=NoTokenizer())

    def files():
        return {f: f.read_bytes() for f in (tmp_path / "one").rglob("*") if f.is_file()}

    save(tmp_path / "one", write)
    good = files()
    break_token(model, 3)
    with pytest.raises(CheckpointError, match=r"model.embed_tokens.weight hold NaN.*--resume"):
        save(tmp_path / "one", write)
    assert files() == good
    assert not (tmp_path / "one.partial").exists()


def test_an_optimiser_or_a_critic_that_is_not_finite_is_not_saved(tmp_path):
    trainer, _model = trained([answers()], settings=settings_of(Algorithm(name="ppo")))
    moments = trainer.optimiser.state()[0]["second_moment.lm_head.weight"]
    for tensor, named in (
        (moments, "second_moment.lm_head.weight"),
        (trainer.critic.critic.head.weight, "head.weight"),
    ):
        kept = tensor.detach().clone()
        with torch.no_grad():
            tensor.view(-1)[0] = math.inf
            with pytest.raises(CheckpointError, match=f"{named} hold NaN or infinite"):
                save(tmp_path / "one", lambda folder: trainer.save(folder, tokenizer=NoTokenizer()))
            tensor.copy_(kept)
    save(tmp_path / "one", lambda folder: trainer.save(folder, tokenizer=NoTokenizer()))


def test_weights_that_are_not_finite_are_never_exported(tmp_path):
    model = tiny_model()
    export_model(model, NoTokenizer(), tmp_path / "model")
    good = (tmp_path / "model" / "model.safetensors").read_bytes()
    break_token(model, VOCABULARY - 1)
    with pytest.raises(CheckpointError, match="must be finite to be saved"):
        export_model(model, NoTokenizer(), tmp_path / "model")
    with pytest.raises(CheckpointError, match="must be finite to be saved"):
        export_model(model, NoTokenizer(), tmp_path / "other")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == good
    assert not (tmp_path / "other").exists()


def test_a_batch_without_tokens_changes_nothing():
    empty = [replace(answer, segments=()) for answer in answers()]
    unscored = [replace(answer, reward=None) for answer in answers()]
    trainer, model = trained([empty, unscored, []])
    assert (trainer.version, trainer.num_bad, trainer.last) == (0, 0, {})
    assert same_weights(model, tiny_model(std=0.3))


@pytest.mark.parametrize("name", ["reinforce_pp", "grpo", "dr_grpo", "rloo", "ppo"])
@pytest.mark.parametrize("batch", ["one answer", "equal rewards"])
def test_a_batch_that_tells_nothing_is_trained_on_without_harm(name, batch):
    """A group of one, a spread of 0."""
    given = answers(samples=2)
    given = given[:1] if batch == "one answer" else [replace(a, reward=0.1) for a in given]
    trainer, model = trained([given], settings=settings_of(Algorithm(name=name)))
    assert trainer.version == 1
    assert math.isfinite(trainer.last["grad_norm"])
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize("kind", get_args(CorrectionName))
@pytest.mark.parametrize("distance", [-5000.0, 5000.0])
def test_tokens_of_weights_far_away_give_finite_ratios(kind, distance):
    """exp overflows beyond 88 in 32 bits and beyond 709 in 64."""
    proximal_T = torch.full((4,), -1.0)
    weights_T = correction_weights(
        proximal_T - distance,
        proximal_T,
        lengths_N=torch.tensor([3, 1]),
        correction=Correction(kind=kind),
    )
    assert weights_T.isfinite().all()
    assert weights_T.max() <= 2
    assert bounded_ratios(proximal_T, proximal_T - distance).isfinite().all()
