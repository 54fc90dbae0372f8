"""Lengths of other people's runs: measured by a reward that gives none, or read from their logs."""

import asyncio
import json
from dataclasses import dataclass
from statistics import fmean

import pytest

import sortedrl
from sortedrl.cli import main
from sortedrl.core.events import Update, read_events
from sortedrl.errors import ConfigError, DataError
from sortedrl.simulate.observed import measure, read_observed
from sortedrl.simulate.settings import simulation_from


@dataclass
class Sample:
    """What slime hands to a reward, as far as it is read."""

    response_length: int
    group_index: int | None = None
    prompt: str = ""


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_trl_gets_none_for_each_answer_and_lengths_are_kept(tmp_path):
    path = tmp_path / "deep" / "lengths.jsonl"
    reward = measure(path)
    for _ in range(2):
        given = reward(
            prompts=["a", "a", "b", "b"],
            completions=["x"] * 4,
            completion_ids=[[1] * 5, [1] * 7, [1], []],
            trainer_state=None,
        )
        assert given == [None] * 4
    rows = lines(path)
    assert [row["tokens"] for row in rows] == [5, 7, 1, 1] * 2
    assert len({row["step"] for row in rows}) == 2
    found = read_observed(path)
    assert (found.answers_per_step, found.samples_per_prompt) == (4, 2)
    assert found.busy == 14 / 28


def test_verl_slime_and_openrlhf_get_what_their_own_reward_gives(tmp_path):
    path = tmp_path / "lengths.jsonl"

    def score(data_source, solution_str, ground_truth, extra_info=None):
        return 0.5

    assert measure(path, score)(data_source="x", solution_str="a" * 41, ground_truth="1") == 0.5

    async def judge(args, sample, **more):
        return 0.25

    assert asyncio.run(measure(path, judge)(None, Sample(response_length=7))) == 0.25

    def remote(queries, prompts, labels):
        return {"rewards": [1.0] * len(queries)}

    given = measure(path, remote)(["a" * 8, "b" * 12], ["a", "b"], ["1", "2"])
    assert given == {"rewards": [1.0, 1.0]}
    assert [row["tokens"] for row in lines(path)] == [11, 7, 2, 3]


def test_siblings_are_known_where_answers_come_one_by_one(tmp_path):
    """The calls of verl, slime and OpenRLHF, as their sources make them."""
    path = tmp_path / "lengths.jsonl"

    async def judge(args, sample, **more):
        return 1.0

    for number in range(4):
        row = {"index": number // 2, "num_turns": number}
        measure(path, lambda **_: 1.0)(solution_str="a" * 8, ground_truth="7", extra_info=row)
        sample = Sample(response_length=2, group_index=number // 2)
        asyncio.run(measure(path, judge)(None, sample))
        prompt = f"question {number // 2} "
        measure(path, lambda *_: {"rewards": [1.0]})([prompt + "a" * 8], [prompt], ["7"])
    noted = lines(path)
    assert {row["tokens"] for row in noted} == {2}, "the prompt of a query is not counted"
    for framework in (noted[0::3], noted[1::3], noted[2::3]):
        prompts = [row["prompt"] for row in framework]
        assert prompts[0] == prompts[1] != prompts[2] == prompts[3]


def test_what_measure_cannot_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"must end in \.jsonl, got lengths\.csv"):
        measure("lengths.csv")
    with pytest.raises(ConfigError, match=r"TRL \(completion_ids\)"):
        measure(tmp_path / "a.jsonl")(something=3)


def test_a_trl_trainer_takes_it_as_one_of_its_rewards(tmp_path):
    """The name and the signature that TRL asks for."""
    assert measure(tmp_path / "a.jsonl").__name__ == "sortedrl_measure"
    assert sortedrl.measure is measure


def test_compare_says_how_idle_the_slots_were_and_what_would_gain(capsys, tmp_path):
    path = tmp_path / "lengths.jsonl"
    reward = measure(path)
    for _ in range(3):
        lengths = [20 + 37 * (number * 7 % 13) for number in range(16)]
        reward(completion_ids=[[0] * n for n in lengths], prompts=[n // 4 for n in range(16)])
    assert main(["compare", str(path), "--strategies", "sorted"]) == 0
    out, err = capsys.readouterr()
    assert "steps of 16 answers, 4 per prompt; " in err
    assert "x the tokens of sync per second of rollout" in out
    comparison = sortedrl.compare(path, strategies=["sorted"], modes=["partial"])
    with pytest.raises(ConfigError, match=r"modes must be a list of names, .* \['partial'\]"):
        sortedrl.compare(path, modes="partial")
    assert comparison.gain > 1
    assert comparison.rows[0]["strategy"] == "sync"
    assert "<table>" in comparison._repr_html_()


def test_verl_dumps_trl_tables_and_verifiers_results_are_read(tmp_path):
    verl = tmp_path / "rollouts"
    verl.mkdir()
    for step in (1, 2, 10):
        rows = [
            {"input": f"q{n // 2}", "output": "x" * 4 * (n + 1), "score": 1.0, "step": step}
            for n in range(8)
        ]
        (verl / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_observed(verl)
    assert found.lengths == tuple(range(1, 9)) * 3
    assert (found.answers_per_step, found.samples_per_prompt) == (8, 2)
    assert found.is_estimated

    results = tmp_path / "results.jsonl"
    rows = [
        {"example_id": n // 2, "completion": [], "token_usage": {"output_tokens": 5.0 + n}}
        for n in range(4)
    ]
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_observed(results).lengths == (5, 6, 7, 8)
    assert read_observed(results).samples_per_prompt == 2

    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pa.table(
        {
            "step": [1] * 4,
            "prompt": ["a", "a", "b", "b"],
            "completion": [[{"role": "assistant", "content": "x" * 8}]] * 4,
            "accuracy": [1.0] * 4,
        }
    )
    folder = tmp_path / "completions"
    folder.mkdir()
    parquet.write_table(table, folder / "completions_00001.parquet")
    found = read_observed(folder)
    assert (found.lengths, found.answers_per_step, found.samples_per_prompt) == ((2,) * 4, 4, 2)


def test_fit_writes_lengths_slots_and_schedule_of_other_logs(capsys, tmp_path):
    path, fitted = tmp_path / "mine.jsonl", tmp_path / "mine.toml"
    rows = [{"tokens": 10 + n, "step": n // 8, "prompt": n // 4} for n in range(32)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["fit", str(path)]) == 0
    fitted.write_text(capsys.readouterr().out)
    simulation = simulation_from(str(fitted))
    assert (simulation.engine.slots, simulation.schedule.samples_per_prompt) == (8, 4)
    assert simulation.lengths.values == tuple(range(10, 42))
    assert main(["fit", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answers_per_step"] == 8


def test_fit_takes_slots_and_schedule_from_events(capsys, tmp_path):
    events, fitted = tmp_path / "events.jsonl", tmp_path / "fitted.toml"
    words = ["simulate", "picture", "--mode", "coupled", "--lookahead", "1"]
    assert main([*words, "--events", str(events)]) == 0
    capsys.readouterr()
    assert main(["fit", str(events)]) == 0
    fitted.write_text(capsys.readouterr().out)
    found = simulation_from(str(fitted))
    true = simulation_from("picture")
    assert (found.engine.slots, found.groups) == (true.engine.slots, true.groups)
    assert found.schedule.name == "sorted/coupled +1"
    assert found.schedule.group_prompts == true.schedule.group_prompts
    assert found.schedule.update_batch == true.schedule.update_batch
    assert main(["fit", str(events), "--json"]) == 0
    of_the_file = capsys.readouterr().out
    assert json.loads(of_the_file)["schedule"]["mode"] == "coupled"
    assert main(["fit", str(tmp_path), "--json"]) == 0  # the folder of the run will do
    assert capsys.readouterr().out == of_the_file
    for run in (events, tmp_path):
        with pytest.raises(DataError, match=rf"sortedrl fit {run} > mine\.toml"):
            simulation_from(str(run))


def test_fit_counts_interrupted_answers_as_far_as_they_were_seen(capsys, tmp_path):
    """In on-policy mode short answers are trained in place of long ones; the lengths are not."""
    events, fitted = tmp_path / "events.jsonl", tmp_path / "fitted.toml"
    true = _trained_mean(events, "--strategy", "sync")
    trained = _trained_mean(events, "--mode", "on_policy")
    capsys.readouterr()
    assert main(["fit", str(events)]) == 0
    fitted.write_text(capsys.readouterr().out)
    estimated = fmean(simulation_from(str(fitted)).lengths.values)
    assert trained / true < 0.9
    assert abs(estimated / true - 1) < 0.05


def _trained_mean(events, *words):
    """The mean length that a simulated run trains on."""
    assert main(["simulate", "paper", "--groups", "4", *words, "--events", str(events)]) == 0
    updates = [event for event in read_events(events) if isinstance(event, Update)]
    return fmean(trained.tokens for update in updates for trained in update.trained)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", "", "has no answers"),
        ("a.jsonl", "nothing\n", "not JSON lines"),
        ("a.jsonl", '{"reward": 1}\n', "a line must have one of tokens"),
        ("a.jsonl", '{"tokens": "many"}\n', "tokens must be a number"),
        ("a.parquet", "nothing", "not Parquet"),
    ],
)
def test_a_log_that_cannot_be_read_is_refused(tmp_path, name, text, words):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        read_observed(path)


def test_a_pickle_is_never_opened(tmp_path):
    with pytest.raises(ConfigError, match="is a pickle, which can run arbitrary code"):
        read_observed(tmp_path / "rollout_3.pt")
