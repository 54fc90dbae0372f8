"""The table against a peer: the same work on both sides, and numbers counted alike."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerControl, TrainerState, TrainingArguments

from experiments import learning
from experiments.__main__ import merged
from experiments.peer import TrlProcess, asked_rows, section, trials, trl_arms, trl_job
from experiments.peer_job import AskedRow, Job, read_rows, write_rows
from experiments.peer_numbers import SHOWN, curve_numbers, speeds, table
from experiments.peer_scores import scored, with_scores
from experiments.peer_section import DIFFERENCES
from experiments.peer_trl import Watch, arguments, save_weights
from experiments.record import Record, Results
from experiments.trials import ROOT, Setup
from sortedrl.config.data import PeriodicEvaluation, RewardSettings
from sortedrl.config.parsing import read_toml
from sortedrl.config.schedule import EngineSettings
from sortedrl.core.files import read_metrics
from sortedrl.data.stream import PromptStream, tokenized
from sortedrl.errors import ConfigError
from sortedrl.models.loading import load_model, load_tokenizer
from sortedrl.rewards.functions import RewardSource
from sortedrl.rewards.pool.pool import RewardPool
from sortedrl.runs.tasks import training_tasks
from sortedrl.types import Prompt

TINY = "tiny:hidden=16,layers=1,heads=2,context=128"
PUZZLES = "knights_knaves:people=3,forms=claim+and+or,style=compact"
REWARD = RewardSource(
    "sortedrl.rewards.knights:logic_reward",
    {
        "is_compact": True,
        "right": 1.0,
        "partly_right": 0.0,
        "wrong": 0.0,
        "unparsable": 0.0,
        "format_right": 0.0,
        "format_wrong": 0.0,
    },
)


def setup(folder, *, is_small=True):
    settings = read_toml(ROOT / "experiments" / "peer.toml")
    small = settings.pop("small")
    return Setup(
        table="peer",
        device="cpu",
        is_small=is_small,
        settings=merged(settings, small) if is_small else settings,
        results=Results(folder / "results"),
        scratch=folder / "work",
    )


def own_settings(folder, *, is_small=True):
    """Those of our synchronous run, with few and short prompts for a very small model."""
    arm = learning.Arm(algorithm="grpo", name="sync", seed=3)
    settings = learning.train_settings(setup(folder, is_small=is_small), arm, model=Path(TINY))
    return replace(
        settings,
        task=f"{PUZZLES},count=32",
        engine=EngineSettings(slots=8, max_tokens=96),
        evaluation=PeriodicEvaluation(
            tasks=(f"{PUZZLES},count=16,split=test",), every=3, temperature=1.0
        ),
    )


def job_of(settings, rows, **changed):
    job = trl_job(
        settings,
        rows=rows,
        device="cpu",
        reward=REWARD.function,
        reward_options=REWARD.options,
        options={},
    )
    return replace(job, **changed)


def update_row(update, *, seconds, samples=8, tokens=80, generating=0.5):
    return {
        "update": update,
        "total/seconds": seconds,
        "total/samples": samples * update,
        "total/trained_tokens": tokens * update,
        "rollout/rollout_seconds": generating,
    }


@given(st.integers(2, 30), st.floats(0.01, 100), st.data())
def test_a_training_without_a_slow_start_is_as_fast_later_as_over_all(count, pace, data):
    first = data.draw(st.integers(0, count - 1))
    rows = [update_row(n, seconds=n * pace) for n in range(1, count + 1)]
    found = speeds(rows, first=first)
    for name in ("samples_per_second", "tokens_per_second"):
        assert found[f"later_{name}"] == pytest.approx(found[name])
    assert found["samples_per_second"] == pytest.approx(8 / pace)


@given(st.floats(0.1, 100), st.integers(1, 4))
def test_a_slow_first_update_does_not_count_later(late, first):
    rows = [update_row(n, seconds=n + late) for n in range(1, 7)]
    found = speeds(rows, first=first)
    assert found["later_samples_per_second"] == pytest.approx(8)
    assert found["samples_per_second"] == pytest.approx(48 / (6 + late))
    assert found["generation_share"] == pytest.approx(3 / (6 + late))


def test_rows_of_evaluations_are_no_updates():
    rows = [update_row(1, seconds=2.0), {"update": 1, "evaluation/score": 0.5}]
    assert speeds(rows, first=0) == speeds(rows[:1], first=0)


def test_a_run_needs_more_updates_than_are_left_out():
    with pytest.raises(ConfigError, match="below the 2 updates of a run, got 2"):
        speeds([update_row(n, seconds=n) for n in (1, 2)], first=2)


@given(st.integers(1, 60), st.integers(1, 60))
def test_weights_are_kept_at_every_evaluation_and_at_the_end(updates, every):
    job = replace(a_job(), updates=updates, evaluate_every=every)
    assert job.evaluated[-1] == updates
    assert all(update % every == 0 for update in job.evaluated[:-1])
    assert len(job.evaluated) == -(-updates // every)


def a_job():
    return Job(
        model="model",
        rows="rows.jsonl",
        out="out",
        seed=1,
        device="cpu",
        threads=1,
        is_bf16=False,
        samples_per_prompt=2,
        update_batch=4,
        updates=3,
        max_tokens=16,
        temperature=1.0,
        clip=0.2,
        learning_rate=1e-4,
        beta1=0.9,
        beta2=0.999,
        epsilon=1e-8,
        weight_decay=0.0,
        max_norm=1.0,
        evaluate_every=2,
        reward=REWARD.function,
        reward_options=REWARD.options,
        options={},
    )


def test_trl_is_asked_for_what_our_own_run_is_asked_for(tmp_path):
    settings = own_settings(tmp_path)
    rows = [AskedRow("A?", [65, 63], {})] * 32
    job = job_of(settings, rows)
    schedule, optimiser = settings.schedule, settings.optimiser
    assert job.updates * job.update_batch == len(rows) * schedule.samples_per_prompt
    assert job.updates == settings.updates_expected(num_rows=len(rows))
    given = arguments(job)
    assert given["per_device_train_batch_size"] == schedule.update_batch
    assert given["num_generations"] == schedule.samples_per_prompt
    assert given["max_completion_length"] == settings.engine.max_tokens
    assert given["learning_rate"] == optimiser.learning_rate
    assert given["max_grad_norm"] == optimiser.max_grad_norm
    assert (given["beta"], given["shuffle_dataset"], given["bf16"]) == (0.0, False, False)


def test_trl_gets_bf16_where_our_own_run_has_it(tmp_path):
    settings = own_settings(tmp_path)
    rows = [AskedRow("A?", [65, 63], {})] * 32

    def is_bf16(precision, device):
        chosen = replace(settings, precision=precision)
        return trl_job(
            chosen, rows=rows, device=device, reward="a:b", reward_options={}, options={}
        ).is_bf16

    assert is_bf16("auto", "cuda")
    assert is_bf16("bfloat16", "cpu")
    assert not is_bf16("auto", "cpu")
    assert not is_bf16("float32", "cuda")


def test_answers_that_fill_no_update_are_refused(tmp_path):
    rows = [AskedRow("A?", [65, 63], {})] * 31
    with pytest.raises(ConfigError, match="124 answers must be a multiple of update_batch 64"):
        job_of(own_settings(tmp_path), rows)


def test_a_learning_rate_with_a_course_is_refused(tmp_path):
    settings = own_settings(tmp_path)
    falling = replace(settings, optimiser=replace(settings.optimiser, schedule="cosine"))
    with pytest.raises(ConfigError, match="needs a constant learning rate"):
        job_of(falling, [AskedRow("A?", [65, 63], {})] * 32)


def test_the_prompts_are_those_of_our_own_run_in_its_order(tmp_path):
    settings = own_settings(tmp_path)
    task, _ = training_tasks(settings)
    tokenizer = load_tokenizer(TINY)
    stream = PromptStream(tokenized(task.rows, tokenizer).rows, seed=settings.seed)
    rows = asked_rows(settings)
    assert [row.tokens for row in rows] == [list(p.tokens) for p in stream.take(32)]
    # TRL gets the text, and makes tokens of it itself.
    assert [tokenizer(row.text)["input_ids"] for row in rows] == [row.tokens for row in rows]


def test_rows_come_back_from_their_file_as_they_were(tmp_path):
    rows = asked_rows(own_settings(tmp_path))
    write_rows(rows, tmp_path / "new" / "rows.jsonl")
    assert read_rows(tmp_path / "new" / "rows.jsonl") == rows


def test_trl_scores_answers_as_our_own_run_does(tmp_path):
    rows = asked_rows(own_settings(tmp_path))[:2]
    right, answer = str(rows[0].fields["response"]), str(rows[0].fields["answer"])
    head = right.removesuffix(f"{answer}</answer>")
    answers = [right, f"{head}{answer.swapcase()}</answer>", f"{head}ab</answer>", answer, ""]
    watch = Watch(replace(a_job(), out=str(tmp_path)), rows)
    found = watch.right(
        prompts=[rows[0].text] * 5,
        completions=answers,
        completion_ids=[[1, 2]] * 5,
        row=[0] * 5,
        trainer_state=None,
    )
    with RewardPool(REWARD, RewardSettings(workers=1), folder=tmp_path) as pool:
        prompt = Prompt(id=0, fields=rows[0].fields)
        tickets = [pool.submit(prompt, answer, sample_index=0) for answer in answers]
        ours = [outcome.score.reward for outcome in pool.wait(tickets)]
    watch.file.close()
    assert found == ours == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert (watch.window.answers, watch.window.tokens, watch.window.reward) == (5, 10, 1.0)


def test_other_prompts_than_ours_stop_the_training(tmp_path):
    rows = [AskedRow("A", [65], {}), AskedRow("B", [66], {})]
    watch = Watch(replace(a_job(), out=str(tmp_path)), rows)
    generate = watch.timed(lambda prompt_ids, images: (prompt_ids, images))
    assert generate([[65], [65]], None) == ([[65], [65]], None)
    with pytest.raises(ValueError, match=r"prompt 3 must have the tokens \[66\]"):
        generate([[66], [67]], None)
    watch.file.close()


def test_kept_weights_are_asked_the_held_out_puzzles(tmp_path):
    settings = own_settings(tmp_path)
    path = tmp_path / "weights-1.safetensors"
    save_weights(load_model(TINY, dtype=None, device="cpu"), path)
    other = tmp_path / "weights-2.safetensors"
    save_weights(load_model(f"{TINY},seed=5", dtype=None, device="cpu"), other)
    settings.out.mkdir(parents=True)
    found = scored(settings, {1: path, 2: other})
    assert sorted(found) == [0, 1, 2]
    assert found[1] == found[0]
    assert found[2].mean_length != found[0].mean_length


def test_scores_stand_behind_their_update(tmp_path):
    settings = replace(own_settings(tmp_path), out=tmp_path / "trl")
    job = job_of(settings, [AskedRow("A?", [65, 63], {})] * 32)
    settings.out.mkdir()
    watch = Watch(job, [])
    for update in (1, 2):
        watch.file({**update_row(update, seconds=float(update)), "reward/mean": 0.5})
    watch.file.close()
    for update in job.evaluated:
        save_weights(load_model(TINY, dtype=None, device="cpu"), job.weights(update))
    with_scores(job, settings)
    rows = read_metrics(job.metrics)
    assert [(row["update"], "evaluation/score" in row) for row in rows] == [
        (0, True),
        (1, False),
        (2, False),
        (2, True),
    ]
    numbers = curve_numbers(settings.out, targets=[0.0])
    assert [point["samples"] for point in numbers["curve"]] == [0, 16]
    assert numbers["reached"]["0"]["seconds"] == 0.0


def test_a_failing_trl_says_where_to_look(tmp_path):
    process = TrlProcess(tmp_path / "trl.log", python="/bin/false")
    with pytest.raises(RuntimeError, match=r"see .*trl\.log; set SORTEDRL_TRL_PYTHON"):
        process.train(a_job())


def test_the_trials_of_a_seed_stand_together(tmp_path):
    names = [trial.name for trial in trials(setup(tmp_path, is_small=False))]
    assert names[: len(names) // 2] == [
        "warm-0",
        "grpo-sync-0",
        "grpo-partial-0",
        "grpo-coupled-0",
        "trl-generate-0",
        "trl-continuous-0",
    ]
    assert {name[-1] for name in names[len(names) // 2 :]} == {"1"}


@pytest.mark.parametrize("is_small", [False, True])
def test_every_arm_of_the_table_has_whole_updates(tmp_path, is_small):
    made = setup(tmp_path, is_small=is_small)
    for name in made.settings["arms"]:
        arm = learning.Arm(algorithm="grpo", name=name, seed=0)
        settings = learning.train_settings(made, arm, model=Path(TINY))
        rows = [AskedRow("A?", [65, 63], {})] * training_count(settings)
        job = job_of(settings, rows)
        assert job.updates > made.settings["first_updates"]
        assert settings.engine.slots == settings.schedule.update_batch
        assert job.updates % settings.evaluation.every == 0
        group = settings.schedule.group_trajectories
        assert len(rows) * settings.schedule.samples_per_prompt % group == 0
    assert {arm.name for arm in trl_arms(made.settings)} <= made.settings["seconds"].keys()


def training_count(settings):
    return int(settings.task.partition("count=")[2].partition(",")[0])


def record(arm, seed, *, pace, seconds_to, device="A GPU"):
    numbers = {
        "kind": "run",
        "arm": arm,
        "seed": seed,
        **dict.fromkeys(SHOWN, 1.0),
        "samples_per_second": pace,
        "first_score": 0.25,
        "load": 1.0 + seed,
        "reached": {
            "0.2": {"samples": 0, "seconds": 0.0},
            "0.5": {"samples": None if seconds_to is None else 10.0, "seconds": seconds_to},
        },
    }
    if arm.startswith("trl-"):
        numbers["versions"] = {"trl": "1.2", "torch": "9.9"}
    return Record(
        table="peer",
        trial=f"{arm}-{seed}",
        command=f"measure on {device}",
        commit="abc",
        date="2026-01-02",
        machine={"device": device, "cores": "2", "python": "3.12", "torch": "8.8"},
        seconds=1.0,
        numbers=numbers,
    )


def test_a_row_of_the_table_has_the_numbers_of_its_seeds():
    records = [
        record("trl-generate", 1, pace=4.0, seconds_to=None),
        record("trl-generate", 0, pace=2.0, seconds_to=9.0),
        record("partial", 0, pace=12.0, seconds_to=3.0),
    ]
    warm = replace(records[0], numbers={"kind": "warm", "seed": 0})
    own, peer = table([warm, *records])
    assert (own.arm, own.seeds, peer.arm, peer.seeds) == ("partial", (0,), "trl-generate", (0, 1))
    assert peer.cells["samples_per_second"].values == (2.0, 4.0)
    assert peer.cells["seconds_to_0.5"].values == (9.0, None)
    assert peer.cells["samples_per_second_ratio"].values == (1.0, 1.0)
    # Compared with the same seed, not with the mean.
    assert own.cells["samples_per_second_ratio"].values == (6.0,)


def test_without_the_peer_there_is_no_ratio():
    (row,) = table([record("partial", 0, pace=12.0, seconds_to=3.0)])
    assert row.cells["samples_per_second_ratio"].values == (None,)


def test_two_machines_never_share_a_table():
    gpu = [record("sync", 0, pace=400.0, seconds_to=3.0)]
    cpu = [
        record("sync", 0, pace=8.0, seconds_to=30.0, device="A CPU"),
        record("trl-generate", 0, pace=2.0, seconds_to=None, device="A CPU"),
    ]
    text = section(gpu, cpu)
    above, below = text.split("**On the CPU, small.**")
    assert ("| 400.0 | not measured |" in above, "| 400.0 |" in below) == (True, False)
    assert ("| 8.0 | 4.00 |" in above, "| 8.0 | 4.00 |" in below) == (False, True)
    assert "No results of TRL on this machine." in above
    assert "No results of TRL" not in below
    assert "Command: `measure on A CPU`.\nCommit: abc (2026-01-02).\nMachine: A CPU" in below
    assert "sortedrl with torch 8.8; TRL with trl 1.2, torch 9.9." in below
    assert all(f"- {difference}\n" in below for difference in DIFFERENCES)


def test_how_busy_the_machine_was_is_told():
    runs = [record("sync", seed, pace=8.0, seconds_to=3.0) for seed in (0, 1)]
    assert "busy core): 1.0 to 2.0." in section([], runs)


def test_a_score_that_all_had_from_the_start_has_no_column():
    text = section([], [record("sync", 0, pace=8.0, seconds_to=30.0)])
    assert "samples and seconds to 50 %" in text
    assert "seconds to 20 %" not in text
    assert "| 10, 30.00 s |" in text
    assert "On the GPU" not in text


def test_all_rows_of_a_table_are_as_wide_as_its_head():
    text = section([], [record("trl-generate", 0, pace=2.0, seconds_to=None)])
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1


def test_an_update_leaves_its_numbers_and_a_line_at_once(tmp_path, capsys):
    """Of a training that is cut, what it did so far is known."""
    job = replace(a_job(), out=str(tmp_path), evaluate_every=3)
    watch = Watch(job, [AskedRow("A", [65], {})])
    watch.timed(lambda prompt_ids: prompt_ids)([[65], [65]])
    watch.on_step_end(TrainingArguments(tmp_path), TrainerState(global_step=1), TrainerControl())
    (row,) = read_metrics(job.metrics)
    assert (row["update"], row["total/samples"]) == (1, 0)
    said = capsys.readouterr().err.splitlines()
    assert "generated 2 answers in" in said[0]
    assert "update 1 of 3 after" in said[1]
    watch.file.close()


def test_the_process_of_trl_ends_with_its_parent(tmp_path):
    """However the parent ends: a pipe without a writer is all that the child sees."""
    child = (
        "import time; from experiments.peer_trl import end_with_input; end_with_input(0); "
        "print('here', flush=True); time.sleep(60)"
    )
    parent = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE, "
        "stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE) as p:
        pid = int(p.stdout.readline())
        assert is_alive(pid)
        p.kill()
    wait_until(lambda: not is_alive(pid))


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(holds, *, seconds=10.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


# TRL sets it itself, by the name that transformers has deprecated since 5.23.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_trl_takes_the_arguments(tmp_path):
    trl = pytest.importorskip("trl")
    job = job_of(own_settings(tmp_path), [AskedRow("A?", [65, 63], {})] * 32)
    config = trl.GRPOConfig(**arguments(replace(job, out=str(tmp_path))))
    # All answers of an update are generated at once, and trained on in one step.
    assert config.generation_batch_size == job.update_batch
    assert config.steps_per_generation == 1
