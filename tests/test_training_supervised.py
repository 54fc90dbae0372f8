"""Supervised steps: which rows they take, and what their loss is."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from native_worlds import VOCABULARY, tiny_model
from sortedrl.config.algorithm import Optimisation
from sortedrl.errors import TrainingError
from sortedrl.runs.sft import step_rows, supervised_steps
from sortedrl.training.batch import TokenSequence
from sortedrl.training.forward import PackedModel
from sortedrl.training.optimiser import Optimiser

SEQUENCES = [
    TokenSequence([(3 * n + k) % VOCABULARY for k in range(2 + n % 3)], [5 + n, 7, 9][: 1 + n % 3])
    for n in range(7)
]


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=30),
    st.integers(1, 120),
    st.integers(1, 3),
    st.integers(0, 9),
)
def test_every_row_is_met_once_per_epoch_and_steps_have_their_tokens(lengths, batch, epochs, seed):
    steps = step_rows(lengths, batch_tokens=batch, epochs=epochs, seed=seed)
    met = [row for step in steps for row in step]
    for epoch in range(epochs):
        of_epoch = met[epoch * len(lengths) : (epoch + 1) * len(lengths)]
        assert sorted(of_epoch) == list(range(len(lengths)))
    assert len(met) == epochs * len(lengths)
    for step in steps[:-1]:
        tokens = [lengths[row] for row in step]
        assert sum(tokens) >= batch
        assert sum(tokens[:-1]) < batch, "and not a row more"
    assert steps == step_rows(lengths, batch_tokens=batch, epochs=epochs, seed=seed)


def test_epochs_and_seeds_have_orders_of_their_own():
    lengths = [1] * 20
    (first,) = step_rows(lengths, batch_tokens=99, epochs=2, seed=0)
    (other,) = step_rows(lengths, batch_tokens=99, epochs=2, seed=1)
    assert first[:20] != first[20:]
    assert first != other


def steps_of(model, *, rows, budget=4096, max_bad=3, learning_rate=1e-3):
    settings = Optimisation(learning_rate=learning_rate)
    optimiser = Optimiser(dict(model.named_parameters()), settings, total_steps=None)
    return supervised_steps(
        PackedModel(model),
        optimiser,
        SEQUENCES,
        rows=rows,
        micro_batch_tokens=budget,
        max_bad=max_bad,
    )


def plain_loss(model, rows):
    """One sequence at a time, the mean over all answer tokens."""
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            prompt, answer = SEQUENCES[row].prompt, SEQUENCES[row].answer
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0].double()
            for place, token in enumerate(answer):
                total -= float(logits[len(prompt) + place - 1].log_softmax(-1)[token])
                count += 1
    return total / count


@pytest.mark.parametrize("budget", [1, 8, 4096])
def test_the_loss_is_the_mean_over_answer_tokens_however_they_are_packed(budget):
    model = tiny_model(std=0.3)
    rows = [[0, 3, 5, 1], [2, 6, 4]]
    expected = plain_loss(model, rows[0])
    steps = steps_of(model, rows=rows, budget=budget)
    first = next(steps)
    assert first.loss == pytest.approx(expected, abs=1e-5)
    after = plain_loss(model, rows[1])
    second = next(steps)
    assert second.loss == pytest.approx(after, abs=1e-5)
    assert (first.step, second.step) == (1, 2)
    assert first.answer_tokens == sum(len(SEQUENCES[row].answer) for row in rows[0])
    assert list(steps) == []


def test_the_epoch_of_a_step_is_that_of_its_last_row():
    rows = step_rows([s.num_rows for s in SEQUENCES], batch_tokens=9, epochs=3, seed=0)
    found = [step.epoch for step in steps_of(tiny_model(), rows=rows)]
    met = 0
    for epoch, step in zip(found, rows, strict=True):
        met += len(step)
        assert epoch == (met - 1) // len(SEQUENCES)
    assert found[-1] == 2


def test_it_learns_what_it_sees():
    found = [step.loss for step in steps_of(tiny_model(), rows=[range(7)] * 30, learning_rate=0.01)]
    assert found[-1] < found[0] / 3


def test_a_model_that_is_not_finite_stops_it_after_a_while_and_stays_as_it_is():
    model = tiny_model()
    steps = steps_of(model, rows=[range(7)] * 5, max_bad=3)
    with torch.no_grad():
        model.get_input_embeddings().weight[SEQUENCES[0].prompt[0]] = math.nan
    before = [parameter.clone() for parameter in model.parameters()]
    found = [next(steps), next(steps)]
    with pytest.raises(TrainingError, match="3 steps in a row"):
        next(steps)
    assert all(math.isnan(step.loss) for step in found)
    for was, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(was, parameter) or was.isnan().any()
