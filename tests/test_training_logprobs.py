"""Chunked log-probabilities against the plain ones, in float64.

Axes: T tokens, D hidden size, V vocabulary.
"""

import pytest
import torch

from sortedrl.training import forward
from sortedrl.training.forward import token_logprobs


def inputs(tokens=13, hidden=5, vocabulary=17, *, dtype=torch.float64, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    targets_T = torch.randint(0, vocabulary, (tokens,), generator=generator)
    bias_V = draw(vocabulary) if bias else None
    return draw(tokens, hidden), draw(vocabulary, hidden), bias_V, targets_T


def plain(hidden_TD, weight_VD, bias_V, targets_T, *, temperature):
    logits_TV = hidden_TD @ weight_VD.T + (0 if bias_V is None else bias_V)
    logprobs_TV = (logits_TV / temperature).log_softmax(-1)
    chosen_T = logprobs_TV.gather(1, targets_T[:, None])[:, 0]
    return chosen_T, -(logprobs_TV.exp() * logprobs_TV).sum(-1)


def gradients(values, parameters):
    """Of a sum in which every token counts differently."""
    total = sum(
        (value * torch.linspace(-1, 2, len(value), dtype=value.dtype)).sum() for value in values
    )
    return torch.autograd.grad(total, parameters)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 13, 100, None])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_those_of_log_softmax(
    chunk_tokens, temperature, with_entropy, bias
):
    hidden_TD, weight_VD, bias_V, targets_T = inputs(bias=bias)
    parameters = [p for p in (hidden_TD, weight_VD, bias_V) if p is not None]
    ours = token_logprobs(
        hidden_TD,
        weight_VD,
        targets_T,
        bias_V=bias_V,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
    )
    theirs = plain(hidden_TD, weight_VD, bias_V, targets_T, temperature=temperature)
    if not with_entropy:
        assert ours[1] is None
    ours, theirs = ours[: 1 + with_entropy], theirs[: 1 + with_entropy]
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    expected = gradients(theirs, parameters)
    torch.testing.assert_close(gradients(ours, parameters), expected, rtol=1e-9, atol=1e-11)


def test_the_gradient_is_that_of_finite_differences():
    hidden_TD, weight_VD, bias_V, targets_T = inputs(tokens=5, hidden=3, vocabulary=7)

    def both(hidden_TD, weight_VD, bias_V):
        return token_logprobs(
            hidden_TD,
            weight_VD,
            targets_T,
            bias_V=bias_V,
            temperature=1.3,
            chunk_tokens=2,
            with_entropy=True,
        )

    assert torch.autograd.gradcheck(both, (hidden_TD, weight_VD, bias_V))


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_the_two_may_have_no_gradient(used):
    hidden_TD, weight_VD, bias_V, targets_T = inputs()
    ours = token_logprobs(
        hidden_TD, weight_VD, targets_T, bias_V=bias_V, chunk_tokens=3, with_entropy=True
    )
    theirs = plain(hidden_TD, weight_VD, bias_V, targets_T, temperature=1)
    parameters = (hidden_TD, weight_VD, bias_V)
    torch.testing.assert_close(
        gradients([ours[used]], parameters), gradients([theirs[used]], parameters)
    )


def test_a_token_that_is_almost_certain_keeps_its_small_gradient():
    hidden_TD = torch.tensor([[30.0]], requires_grad=True)
    weight_VD = torch.tensor([[1.0], [0.0]])
    logprobs_T, _ = token_logprobs(hidden_TD, weight_VD, torch.tensor([0]))
    (gradient_TD,) = torch.autograd.grad(logprobs_T.sum(), hidden_TD)
    torch.testing.assert_close(gradient_TD.item(), torch.tensor(-30.0).exp().item())


def test_a_frozen_weight_costs_no_product(monkeypatch):
    products = []
    add_product = forward._add_product

    def counted(total, *factors):
        products.append(total.shape)
        add_product(total, *factors)

    monkeypatch.setattr(forward, "_add_product", counted)
    hidden_TD, weight_VD, _, targets_T = inputs(bias=False)
    for weight in (weight_VD, weight_VD.detach()):
        logprobs_T, _ = token_logprobs(hidden_TD, weight, targets_T, chunk_tokens=7)
        logprobs_T.sum().backward()
    assert products == [weight_VD.shape] * 2


def test_never_are_there_logits_of_all_tokens(monkeypatch):
    seen = []
    make = forward._logits

    def counted(*arguments, temperature):
        made = make(*arguments, temperature=temperature)
        seen.append(tuple(made.shape))
        return made

    monkeypatch.setattr(forward, "_logits", counted)
    monkeypatch.setattr(forward, "_CHUNK_BYTES", {"cpu": 4 * 17 * 5})
    hidden_TD, weight_VD, bias_V, targets_T = inputs()
    token_logprobs(hidden_TD, weight_VD, targets_T, bias_V=bias_V)[0].sum().backward()
    assert seen == [(5, 17), (5, 17), (3, 17)] * 2


def test_in_float32_and_bfloat16_it_is_close_to_float64():
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        hidden_TD, weight_VD, bias_V, targets_T = inputs(40, 32, 301, dtype=dtype)
        parameters = [hidden_TD, weight_VD, bias_V]
        exact = [p.detach().double().requires_grad_() for p in parameters]
        ours, _ = token_logprobs(hidden_TD, weight_VD, targets_T, bias_V=bias_V, chunk_tokens=16)
        theirs, _ = plain(*exact, targets_T, temperature=1)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
        for mine, right in zip(
            gradients([ours], parameters), gradients([theirs], exact), strict=True
        ):
            assert mine.dtype == dtype
            assert (mine.double() - right).norm() <= tolerance * right.norm()


def test_a_trainer_gives_the_log_probabilities_of_answers_at_temperature_1():
    """vLLM and SGLang workers are compared with these, whatever the run samples at."""
    from native_worlds import tiny_model
    from training_worlds import rollout, train_settings, trainer_of, written

    model = tiny_model(std=0.3)
    trainer = trainer_of(model, train_settings(rollout=rollout(0.7)))
    answers = written(model, [5, 1, 9], temperature=1.0)
    found = trainer.logprobs(answers)
    assert [len(row) for row in found] == [5, 1, 9]
    for row, answer in zip(found, answers, strict=True):
        assert row == pytest.approx(answer.logprobs, abs=1e-4)
    assert trainer._policy.temperature == 0.7
