"""Loss and advantage functions of the user: called with tensors by name, and checked."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from native_worlds import tiny_model
from sortedrl.config.algorithm import Algorithm
from sortedrl.config.schedule import Schedule
from sortedrl.errors import ConfigError, TrainingError
from sortedrl.training.functions import check_functions, token_advantages, token_losses
from sortedrl.types import TrainBatch
from training_worlds import train_settings, trainer_of, written

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "own-loss.md"
LOSS = {
    "current_T": torch.tensor([-1.0, -2.0, -3.0], requires_grad=True),
    "anchor_T": torch.tensor([-1.0, -2.0, -3.5]),
    "advantages_T": torch.tensor([1.0, 1.0, -1.0]),
    "owners_T": torch.tensor([0, 0, 1]),
    "lengths_N": torch.tensor([2, 1]),
}
ADVANTAGE = {
    "rewards_N": torch.tensor([1.0, 0.0], dtype=torch.float64),
    "rewards_T": torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64),
    "prompts_N": torch.tensor([4, 4]),
    "lengths_N": torch.tensor([2, 1]),
    "owners_T": torch.tensor([0, 0, 1]),
    "is_truncated_N": torch.tensor([False, True]),
}


@pytest.fixture
def written_in(tmp_path):
    """The address of a function with this source, in a file of its own."""

    def address(source, name):
        path = tmp_path / f"mine_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(source)
        return f"{path}:{name}"

    return address


def weights_after(algorithm):
    model = tiny_model(std=0.3)
    samples = 2 if algorithm.needs_siblings else 1
    schedule = Schedule(
        group_prompts=4 // samples,
        samples_per_prompt=samples,
        update_batch=4,
        harvest_unit="prompt" if samples > 1 else "trajectory",
    )
    trainer = trainer_of(model, train_settings(algorithm=algorithm, schedule=schedule))
    trainer.update(TrainBatch(0, tuple(written(model, [5, 9, 3, 7], samples=samples))))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_example_of_the_docs_trains_as_the_loss_and_advantage_it_rewrites(written_in):
    source = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S).group(1)
    own = Algorithm(
        name="dr_grpo",
        advantage=written_in(source, "centred"),
        loss=written_in(source, "plain_ratio"),
    )
    assert own.needs_siblings
    theirs = weights_after(Algorithm(name="dr_grpo"))
    torch.testing.assert_close(weights_after(own), theirs, atol=1e-6, rtol=0)


def test_a_function_gets_what_its_parameters_name_and_keeps_its_own_defaults(written_in):
    source = (
        "def f(advantages_T, *, scale=2.0, current_T): return -scale * advantages_T * current_T"
    )
    found = token_losses(written_in(source, "f"), LOSS)
    assert found.tolist() == [2.0, 4.0, -6.0]


def test_an_advantage_per_answer_is_that_of_each_of_its_tokens(written_in):
    per_answer = written_in("def f(rewards_N): return rewards_N - 0.5", "f")
    assert token_advantages(per_answer, ADVANTAGE).tolist() == [0.5, 0.5, -0.5]
    per_token = written_in("def f(rewards_T): return rewards_T", "f")
    assert token_advantages(per_token, ADVANTAGE).tolist() == [0.0, 1.0, 0.0]


def test_without_a_name_the_function_is_called_like_its_setting(written_in):
    path = written_in("def loss(current_T): return -current_T", "loss").removesuffix(":loss")
    assert token_losses(path, LOSS).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(current_T): return -current_T.mean()", r"one loss per token.* \(3,\), got \(\)"),
        ("def f(current_T): return current_T.tolist()", "must return a tensor, got list"),
        ("def f(current_T): return -current_T.detach()", "must return losses that depend on curr"),
        ("def f(owners_T): return owners_T", "floating-point numbers, got torch.int64"),
    ],
)
def test_a_result_that_is_no_loss_is_refused(written_in, source, message):
    with pytest.raises(TrainingError, match=message):
        token_losses(written_in(source, "f"), LOSS)


def test_a_result_that_is_no_advantage_is_refused(written_in):
    address = written_in("def f(rewards_N): return rewards_N[:1].repeat(4)", "f")
    with pytest.raises(TrainingError, match=r"shape \(2,\) or \(3,\), got \(4,\)"):
        token_advantages(address, ADVANTAGE)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def f(curent_T): return curent_T",
            "unknown parameter 'curent_T'; did you mean 'current_",
        ),
        ("def g(current_T): return current_T", "unknown function 'f'"),
        ("def f(*tensors): return tensors[0]", "unknown parameter 'tensors'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_the_first_update(
    written_in, source, message
):
    algorithm = Algorithm(loss=written_in(source, "f"))
    with pytest.raises(ConfigError, match=message):
        check_functions(algorithm)
    with pytest.raises(ConfigError, match=message):
        trainer_of(tiny_model(std=0.3), train_settings(algorithm=algorithm))


def test_a_file_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"there is no file nowhere\.py"):
        check_functions(Algorithm(advantage="nowhere.py:f"))


def test_a_function_in_place_of_gae_needs_no_critic():
    own = Algorithm(name="ppo", advantage="mine.py:f")
    assert not own.has_critic
    assert not own.needs_siblings
    assert replace(own, advantage="group").needs_siblings
