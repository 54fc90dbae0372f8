"""Whole runs of every algorithm and schedule: what is trained on, and what is written down."""

import json
from collections import Counter

import pytest

from run_worlds import checkpoints, events, metrics, run_words, said, trained, weights
from sortedrl.training.checkpoint import read_state

ROWS = 24
SIBLINGS = ("--schedule.samples-per-prompt", "2", "--schedule.harvest-unit", "prompt")


pytestmark = pytest.mark.usefixtures("here")


def has_learnt(out, world):
    return weights(out) != (world / "begun" / "model.safetensors").read_bytes()


def times_trained(out):
    return Counter(answer for update in trained(out) for answer in update)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("reinforce_pp", ("--algorithm.kl-coef", "0.1")),
        ("reinforce_pp_baseline", SIBLINGS),
        ("grpo", (*SIBLINGS, "--algorithm.kl-coef", "0.1")),
        ("dr_grpo", SIBLINGS),
        ("rloo", (*SIBLINGS, "--algorithm.kl-coef", "0.1")),
        ("dapo", (*SIBLINGS, "--algorithm.overlong-tokens", "8")),
        ("ppo", ("--optimiser.epochs", "2")),
    ],
)
def test_every_algorithm_learns_and_the_engine_agrees_with_the_trainer(
    capsys, tmp_path, world, name, words
):
    said(capsys, run_words(tmp_path, "--algorithm.name", name, *words))
    samples = 2 if "--schedule.samples-per-prompt" in words else 1
    expected = {(prompt, sample): 1 for prompt in range(ROWS) for sample in range(samples)}
    assert times_trained(tmp_path) == expected
    assert has_learnt(tmp_path, world)
    rows = [row for row in metrics(tmp_path) if "loss" in row]
    assert all(row["grad_norm"] > 0 for row in rows)
    assert sum(row["gap/max"] for row in rows if row["stale_0/share"] == 1) < 1e-4 * len(rows)
    assert ("value_loss" in rows[0]) == (name == "ppo")
    assert ("kl/mean" in rows[-1]) == ("--algorithm.kl-coef" in words)


@pytest.mark.parametrize(
    "words",
    [
        ("--schedule.strategy", "sync"),
        ("--schedule.strategy", "posthoc"),
        ("--schedule.mode", "on_policy"),
        ("--schedule.mode", "coupled", "--schedule.lookahead", "1"),
        ("--schedule.mode", "partial", "--schedule.max-staleness", "1"),
        ("--schedule.strategy", "ungrouped"),
        ("--schedule.strategy", "tail_batching"),
        ("--schedule.strategy", "april"),
    ],
)
def test_every_schedule_trains_each_prompt_once_per_epoch_and_its_ledger_balances(
    capsys, tmp_path, words
):
    out, _ = said(capsys, run_words(tmp_path, "--epochs", "2", *words, "--json"))
    assert times_trained(tmp_path) == {(prompt, 0): 1 for prompt in range(2 * ROWS)}
    ending = json.loads(out)
    assert ending["reason"] == "data"
    assert ending["decoded_tokens"] == (
        ending["trained_tokens"] + ending["discarded_tokens"] + ending["cached_tokens"]
    )
    assert ending["cached_tokens"] == 0, "nothing is left unfinished"


def test_rewards_are_written_down_with_their_parts(capsys, tmp_path):
    said(capsys, run_words(tmp_path, "--max-updates", "2", reward="parts"))
    for row in metrics(tmp_path):
        assert row["reward/letters"] + row["reward/length"] == pytest.approx(row["reward/mean"])


def test_answers_still_held_back_at_the_end_are_trained_on(capsys, tmp_path, world):
    words = (*SIBLINGS, "--algorithm.name", "dapo", "--schedule.update-batch", "16")
    _, err = said(capsys, run_words(tmp_path, *words, reward="rarely"))
    rows, batches = metrics(tmp_path), trained(tmp_path)
    assert "held" in rows[0]
    assert len(rows) == len(batches) + 1, "one update more than the loop made"
    assert "loss" in rows[-1]
    assert "held" not in rows[-1]
    assert "answers" in err
    assert has_learnt(tmp_path, world)


def test_the_totals_of_a_row_are_those_of_the_events(capsys, tmp_path):
    said(capsys, run_words(tmp_path))
    updates = [row for row in events(tmp_path) if row["event"] == "update"]
    tokens = answers = 0
    for row, update in zip(metrics(tmp_path), updates, strict=True):
        tokens += sum(answer[3] for answer in update["trained"])
        answers += len(update["trained"])
        assert (row["total/samples"], row["total/trained_tokens"]) == (answers, tokens)
    assert [row["update"] for row in metrics(tmp_path)] == list(range(1, len(updates) + 1))


def test_a_checkpoint_is_saved_where_it_is_due_and_at_the_end(capsys, tmp_path):
    words = ("--saving.every", "2", "--saving.keep-last", "9", "--max-updates", "5")
    said(capsys, run_words(tmp_path, *words))
    found = {one.name: read_state(one) for one in checkpoints(tmp_path)}
    assert list(found) == ["update-000002", "update-000004", "update-000005"]
    for name, state in found.items():
        assert state["run"]["updates"] == state["trainer"]["version"] == int(name[-6:])
        log = (tmp_path / "events.jsonl").read_bytes()[: state["events_bytes"]]
        assert log.endswith(b"\n")
        assert log.count(b'"event":"update"') == int(name[-6:])


def test_the_seed_decides_the_run(capsys, tmp_path):
    for name, seed in (("one", "1"), ("again", "1"), ("other", "2")):
        said(capsys, run_words(tmp_path / name, "--seed", seed, "--max-updates", "2"))
    assert weights(tmp_path / "one") == weights(tmp_path / "again")
    assert events(tmp_path / "one") == events(tmp_path / "again")
    assert weights(tmp_path / "one") != weights(tmp_path / "other")


def test_a_learning_rate_of_zero_leaves_the_weights_as_they_are(capsys, tmp_path, world):
    said(capsys, run_words(tmp_path, "--optimiser.learning-rate", "0"))
    assert not has_learnt(tmp_path, world)
    assert len(trained(tmp_path)) == ROWS // 4


def test_it_learns_what_the_reward_asks_for(capsys, tmp_path):
    said(capsys, run_words(tmp_path, "--epochs", "12", "--saving.every", "999"))
    rewards = [row["reward/mean"] for row in metrics(tmp_path)]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.2
