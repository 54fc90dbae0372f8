"""The ways a training run can go wrong, and what happens then."""

import json
import math
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from run_worlds import (
    Nursery,
    checkpoints,
    events,
    metrics,
    num_resumes,
    run_words,
    said,
    weights,
)
from sortedrl.core.files import read_answers
from sortedrl.errors import ConfigError
from sortedrl.runs import opening
from sortedrl.runs.folder import RunFolder
from sortedrl.training.optimiser import Optimiser

SYNC = ("--schedule.strategy", "sync", "--schedule.group-prompts", "4", "--saving.keep-last", "99")
BEGUN = ("--max-updates", "3")
MORE = ("--max-updates", "5")


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(scope="module")
def runs(world):
    """A run of three updates, and the same run of five."""
    with Nursery(world) as nursery:
        nursery.run(run_words("begun-run", *BEGUN))
        nursery.run(run_words("whole", *MORE))
    return world


@pytest.fixture
def copied(runs, request):
    """A copy of the run of three updates."""
    out = runs / request.node.name.replace("[", "-").replace("]", "")
    shutil.copytree(runs / "begun-run", out)
    return out


def state(checkpoint):
    return json.loads((checkpoint / "state.json").read_text())


# --- what is not finite ---------------------------------------------------------------------------


@pytest.fixture
def spoil(monkeypatch):
    """Make the gradients of these updates infinite, those of policy and critic alike."""

    def of_updates(chosen):
        made, backward = Counter(), Optimiser.backward

        def spoilt(optimiser, loss):
            made[id(optimiser)] += 1
            backward(optimiser, loss * (math.inf if made[id(optimiser)] in chosen else 1))

        monkeypatch.setattr(Optimiser, "backward", spoilt)

    return of_updates


def test_an_update_that_is_not_finite_is_skipped_and_counted(capsys, spoil):
    spoil({2})
    _, err = said(capsys, run_words("skipped", *SYNC, "--max-updates", "4"))
    rows = metrics("skipped")
    assert [row["skipped_steps"] for row in rows] == [0, 1, 0, 0]
    assert [row["version"] for row in rows] == [1, 1, 2, 3]
    assert rows[1]["grad_norm"] is None
    assert err.count("skipped: the gradients were not finite") == 1
    saved = checkpoints("skipped")
    assert [state(one)["trainer"]["num_bad"] for one in saved] == [0, 1, 0, 0]
    for name in ("model/model.safetensors", "optimiser.safetensors"):
        first, second, third, _ = ((one / name).read_bytes() for one in saved)
        assert first == second, "a skipped update leaves everything as it was"
        assert second != third


def test_a_critic_outlives_an_update_that_is_not_finite(capsys, spoil):
    spoil({2})
    words = ["--max-updates", "3", "--algorithm.name", "ppo"]
    said(capsys, run_words("skipped-ppo", *SYNC, *words))
    for tensor in load_file("skipped-ppo/checkpoints/update-000003/critic.safetensors").values():
        assert tensor.isfinite().all()
    assert [row["version"] for row in metrics("skipped-ppo")] == [1, 1, 2]


def test_too_many_such_updates_in_a_row_stop_the_run(capsys, spoil):
    spoil({2, 3})
    words = ["--optimiser.max-bad-updates", "2"]
    _, err = said(capsys, run_words("ruined", *SYNC, *words), code=2)
    assert "sortedrl: 2 updates in a row had a loss or a gradient that is not finite" in err
    assert "--resume" in err
    assert "Traceback" not in err
    saved = checkpoints("ruined")
    assert [one.name for one in saved] == ["update-000001", "update-000002"]
    models = [(one / "model" / "model.safetensors").read_bytes() for one in saved]
    assert models[0] == models[1], "the weights are those before them"


def test_a_model_that_is_not_finite_is_refused_and_nothing_is_written(world, capsys):
    shutil.copytree(world / "begun", "broken")
    tensors = load_file("broken/model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, "broken/model.safetensors", metadata={"format": "pt"})
    words = run_words("nan", "--optimiser.max-bad-updates", "1", model="broken")
    _, err = said(capsys, words, code=2)
    assert "its weights model.norm.weight hold NaN or infinite numbers" in err
    assert "Traceback" not in err
    assert not Path("nan").exists()


def test_weights_that_are_not_finite_are_not_saved_and_the_checkpoint_before_stands(capsys):
    step = Optimiser.step

    def ruinous(optimiser, **given):
        outcome = step(optimiser, **given)
        if optimiser.num_steps == 2:
            next(iter(optimiser._parameters.values())).data[0] = math.nan
        return outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimiser, "step", ruinous)
        _, err = said(capsys, run_words("ruinous", *SYNC, "--max-updates", "2"), code=2)
    assert "weights must be finite to be saved" in err
    assert "model.embed_tokens.weight" in err
    assert "Traceback" not in err
    assert [one.name for one in checkpoints("ruinous")] == ["update-000001"]
    assert not Path("ruinous/model").exists()
    said(capsys, ["train", "ruinous", "--resume"])
    assert Path("ruinous/model").exists()


def test_a_reward_that_is_not_finite_stops_the_run_with_its_place(capsys):
    _, err = said(capsys, run_words("no-reward", reward="nothing"), code=2)
    assert "nan" in err
    assert "no-reward/reward-error.json" in err


# --- the disk -------------------------------------------------------------------------------------


def test_a_full_disk_stops_the_run_and_the_old_checkpoint_stands(runs):
    shutil.copytree("begun-run", "full")
    model = Path("full/checkpoints/update-000003/model/model.safetensors").stat().st_size
    with Nursery(runs) as nursery:
        again = ["train", "full", "--resume", *MORE]
        child = nursery.start(again, file_bytes=model + 10_000)
        assert child.wait() == 2, child.err
        assert "update-000004: the checkpoint cannot be saved: File too large" in child.err
        assert "the last complete checkpoint is update-000003" in child.err
        assert "Traceback" not in child.err
        assert [one.name for one in checkpoints("full")] == ["update-000002", "update-000003"]
        assert not list(Path("full/checkpoints").glob("*.partial")), "the space is given back"
        nursery.run(again)
    assert weights("full") == weights("whole")
    assert metrics("full") == metrics("whole")


def damage(path, how):
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[:-1])
    elif how == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])


@pytest.mark.parametrize(
    ("name", "how", "reason"),
    [
        ("optimiser.safetensors", "flipped", "checksum differs: damaged"),
        ("model/model.safetensors", "truncated", "truncated"),
        ("state.json", "flipped", "checksum differs: damaged"),
        ("buffer.bin", "missing", "missing"),
        ("manifest.json", "truncated", ""),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(capsys, copied, name, how, reason):
    damage(copied / "checkpoints" / "update-000003" / name, how)
    if name == "manifest.json":  # its last byte is a newline, which nobody misses
        (copied / "checkpoints" / "update-000003" / name).unlink()
    _, err = said(capsys, ["train", copied, "--resume", *MORE])
    assert "checkpoint update-000003 is skipped: " in err
    assert reason in err
    assert f"resuming from {copied}/checkpoints/update-000002" in err
    assert weights(copied) == weights("whole")
    assert events(copied) == events("whole")


def test_a_half_written_checkpoint_is_not_looked_at(capsys, copied):
    half = copied / "checkpoints" / "update-000004.partial"
    shutil.copytree(copied / "checkpoints" / "update-000003", half)
    (half / "manifest.json").unlink()
    _, err = said(capsys, ["train", copied, "--resume", *MORE])
    assert f"resuming from {copied}/checkpoints/update-000003" in err
    assert not half.exists()
    assert weights(copied) == weights("whole")


def contents(folder):
    """Every file of a folder with its bytes."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_where_every_checkpoint_is_damaged_nothing_is_written_over(capsys, copied):
    for one in (copied / "checkpoints").iterdir():
        (one / "state.json").write_text("{}")
    before = contents(copied)
    _, err = said(capsys, ["train", copied, "--resume", *MORE], code=2)
    assert "checkpoint update-000003 is skipped: " in err
    assert "none of the 2 checkpoints is usable" in err
    assert contents(copied) == before


def test_a_run_that_never_saved_begins_anew(capsys, copied):
    shutil.rmtree(copied / "checkpoints")
    shutil.rmtree(copied / "model")
    _, err = said(capsys, ["train", copied, "--resume", *MORE])
    assert "has no complete checkpoint yet; starting from the beginning" in err
    assert num_resumes(copied) == 0
    assert weights(copied) == weights("whole")
    assert events(copied) == events("whole")
    assert metrics(copied) == metrics("whole")


def test_a_finished_run_whose_checkpoints_were_deleted_is_not_begun_anew(capsys, copied):
    """It would be trained over: the model is all that is left of it."""
    shutil.rmtree(copied / "checkpoints")
    before = contents(copied)
    _, err = said(capsys, ["train", copied, "--resume", *MORE], code=2)
    assert "must have a checkpoint to resume from, but this one has only its trained model" in err
    assert f"--model {copied / 'model'}" in err
    assert contents(copied) == before


def test_where_there_is_no_run_to_resume_a_new_one_begins_with_words(capsys, tmp_path):
    """A job that is started again and again may always say --resume."""
    _, err = said(capsys, run_words(tmp_path / "gone", "--resume", "--max-updates", "1"))
    assert f"{tmp_path / 'gone'} holds no run to resume; starting a new one" in err
    assert len(metrics(tmp_path / "gone")) == 1


def test_the_name_of_a_run_that_is_gone_is_refused(capsys, tmp_path):
    _, err = said(capsys, ["train", tmp_path / "gone", "--resume"], code=2)
    assert "must be a .toml file or the folder of a run" in err
    assert not (tmp_path / "gone").exists()


def test_a_foreign_checkpoint_is_passed_over(capsys, copied):
    foreign = copied / "checkpoints" / "update-000009"
    foreign.mkdir()
    (foreign / "manifest.json").write_text('{"format": "another", "version": 1, "files": {}}')
    _, err = said(capsys, ["train", copied, "--resume", *MORE])
    assert "update-000009 is skipped" in err
    assert "written by another program" in err
    assert weights(copied) == weights("whole")


def test_a_pickle_in_a_checkpoint_is_never_read(capsys, copied):
    (copied / "checkpoints" / "update-000003" / "model" / "pytorch_model.bin").write_bytes(b"cos")
    _, err = said(capsys, ["train", copied, "--resume", *MORE])
    assert "update-000003 is skipped" in err
    assert "no pickle" in err


def test_logs_that_are_not_those_of_the_run_are_refused(capsys, copied):
    (copied / "events.jsonl").write_text("")
    _, err = said(capsys, ["train", copied, "--resume", *MORE], code=2)
    assert "events.jsonl: must hold" in err


# --- another run ----------------------------------------------------------------------------------


def test_a_folder_that_holds_a_run_is_not_begun_in_again(capsys, copied):
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*")}
    _, err = said(capsys, run_words(copied), code=2)
    assert f"{copied} already holds a run; resume it (--resume)" in err
    assert {path: path.stat().st_mtime_ns for path in copied.rglob("*")} == before


def test_a_run_is_not_resumed_with_settings_that_make_it_another(capsys, copied):
    words = ["--seed", "1", "--schedule.mode", "coupled", "--engine.slots", "7"]
    words += ["--optimiser.beta2", "0.5", "--optimiser.learning-rate", "0.5", "--threads", "1"]
    before = contents(copied)
    _, err = said(capsys, ["train", copied, "--resume", *words], code=2)
    assert "seed was 0, is 1" in err
    assert "schedule.mode was 'partial', is 'coupled'" in err
    assert "engine.slots was 6, is 7" in err
    assert "optimiser.beta2 was 0.999, is 0.5" in err
    assert "threads" not in err
    assert "learning_rate" not in err
    assert contents(copied) == before


def test_an_edited_config_is_compared_with_the_checkpoint(capsys, copied):
    config = copied / "config.toml"
    text = config.read_text()
    config.write_text(text.replace("seed = 0", "seed = 5").replace("batch = 4", "batch = 2"))
    _, err = said(capsys, ["train", copied, "--resume", *MORE], code=2)
    assert "seed was 0, is 5" in err
    assert "schedule.update_batch was 4, is 2" in err
    config.unlink()
    config.write_text(text)
    said(capsys, ["train", copied, "--resume", *MORE])
    assert weights(copied) == weights("whole")


def test_after_a_stop_for_what_is_not_finite_the_learning_rate_may_be_lowered(capsys, spoil):
    spoil({2, 3})
    words = ["--optimiser.max-bad-updates", "2"]
    said(capsys, run_words("ruined-then-slow", *SYNC, *words), code=2)
    again = ["train", "ruined-then-slow", "--resume", "--optimiser.learning-rate", "1e-3"]
    _, err = said(capsys, [*again, "--optimiser.max-bad-updates", "9", "--max-updates", "3"])
    assert "resumed with a changed setting: optimiser.learning_rate was 0.01, is 0.001" in err
    rates = [row["learning_rate"] for row in metrics("ruined-then-slow")]
    assert rates[0] == 0.01
    assert rates[-1] == 0.001


def test_less_memory_may_be_taken_on_resume(capsys, copied):
    words = [
        "--engine.slots",
        "3",
        "--passes.micro-batch-tokens",
        "64",
        "--rollout.cache-gib",
        "0.01",
    ]
    said(capsys, ["train", copied, "--resume", *MORE, *words])
    assert len(metrics(copied)) == 5


def test_settings_that_change_no_answer_may_change(capsys, copied):
    words = ["--saving.every", "9", "--saving.keep-last", "1", "--rewards.workers", "2"]
    words += ["--rewards.time-limit-seconds", "5", "--evaluation.every", "7", "--epochs", "1"]
    said(capsys, ["train", copied, "--resume", *MORE, *words])
    assert weights(copied) == weights("whole")
    assert [one.name for one in checkpoints(copied)] == ["update-000005"]


def test_a_run_keeps_what_was_changed_for_when_it_is_resumed_again(capsys, copied):
    said(capsys, ["train", copied, "--resume", "--max-updates", "4"])
    assert "max_updates = 4" in (copied / "config.toml").read_text()
    _, err = said(capsys, ["train", copied, "--resume"])
    assert "update" in err
    assert len(metrics(copied)) == 4, "the 4 updates that were asked for, and not again 3"


def test_a_run_that_was_moved_is_resumed_where_it_is(capsys, copied):
    moved = copied.with_name("moved")
    copied.rename(moved)
    said(capsys, ["train", moved, "--resume", *MORE])
    assert weights(moved) == weights("whole")
    assert not copied.exists()


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_is_not_resumed_on_other_rows(capsys, tmp_path):
    rows = [{"prompt": f"A:{number};"} for number in range(12)]
    write_rows(tmp_path / "rows.jsonl", rows)
    words = run_words(tmp_path / "run", "--max-updates", "1", task=str(tmp_path / "rows.jsonl"))
    said(capsys, words)
    config = (tmp_path / "run" / "config.toml").read_text()
    write_rows(tmp_path / "rows.jsonl", [*rows[:-1], {"prompt": "B:0;"}])
    again = ["train", tmp_path / "run", "--resume", "--max-updates", "2"]
    _, err = said(capsys, again, code=2)
    assert "the run was started on different rows than the 12 of" in err
    assert (tmp_path / "run" / "config.toml").read_text() == config
    write_rows(tmp_path / "rows.jsonl", rows)
    said(capsys, again)


@pytest.mark.parametrize("changed", ["answer", "level", "new"])
def test_a_run_is_not_resumed_on_other_golds(capsys, tmp_path, changed):
    rows = [{"prompt": f"A:{number};", "answer": "1", "level": 1} for number in range(12)]
    write_rows(tmp_path / "rows.jsonl", rows)
    words = run_words(tmp_path / "run", "--max-updates", "1", task=str(tmp_path / "rows.jsonl"))
    said(capsys, words)
    write_rows(tmp_path / "rows.jsonl", [*rows[:-1], {**rows[-1], changed: 2}])
    _, err = said(capsys, ["train", tmp_path / "run", "--resume", "--max-updates", "2"], code=2)
    assert "their answers or other fields have changed" in err


def test_a_reward_file_may_be_mended_and_that_is_said(capsys, copied):
    judge = Path("judge.py")
    text = judge.read_text()
    judge.write_text(text + "\n# mended\n")
    try:
        _, err = said(capsys, ["train", copied, "--resume", *MORE])
    finally:
        judge.write_text(text)
    assert "the file of the reward judge.py:letters has changed since the checkpoint" in err
    _, err = said(capsys, ["train", copied, "--resume", "--reward", "judge.py:parts"], code=2)
    assert "reward was 'judge.py:letters', is 'judge.py:parts'" in err


# --- the folder -----------------------------------------------------------------------------------


def test_two_processes_never_go_on_with_one_run(runs, copied):
    held = RunFolder(copied)
    with Nursery(runs) as nursery:
        with held.reopened():
            child = nursery.start(["train", copied.name, "--resume", *MORE])
            assert child.wait() == 2
            assert f"another process is training in {copied.name}" in child.err
        child = nursery.start(
            ["train", copied.name, "--resume", "--epochs", "9999", "--max-updates", "99999"]
        )
        assert child.until(lambda: "resuming from" in child.err)
        with pytest.raises(ConfigError, match="another process"), held.reopened():
            pass
        child.signal(signal.SIGKILL)
        child.wait()
        with held.reopened():
            pass


def test_answers_that_are_gone_are_missed_but_not_needed(capsys, copied):
    (copied / "answers.jsonl").unlink()
    _, err = said(capsys, ["train", copied, "--resume", *MORE])
    assert "answers.jsonl: must hold the first" in err
    assert "The run continues; its report shows the answers from here on" in err
    assert weights(copied) == weights("whole")
    assert {answer.update for answer in read_answers(copied / "answers.jsonl")} == {4, 5}


def test_answers_that_were_changed_are_kept_aside(capsys, copied):
    (copied / "answers.jsonl").write_text("mine\n")
    said(capsys, ["train", copied, "--resume", *MORE])
    assert (copied / "answers-older-1.jsonl").read_text() == "mine\n"
    assert weights(copied) == weights("whole")


def test_a_folder_removed_while_its_run_goes_on_stops_the_run(runs):
    with Nursery(runs) as nursery:
        child = nursery.start(run_words("removed", "--epochs", "99"))
        assert child.until(lambda: (runs / "removed" / "events.jsonl").exists())
        (runs / "removed").rename(runs / "removed-elsewhere")
        assert child.wait() == 2, child.err
    assert "was moved or deleted during the run" in child.err
    assert "Traceback" not in child.err
    assert not (runs / "removed").exists()


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "config.toml", "model"])
def test_a_new_run_writes_over_nothing(capsys, tmp_path, name):
    (tmp_path / name).write_text("mine")
    _, err = said(capsys, run_words(tmp_path), code=2)
    assert f"would overwrite {name}" in err
    assert {path.name for path in tmp_path.iterdir()} == {name}
    assert (tmp_path / name).read_text() == "mine"


def test_a_check_that_fails_late_leaves_no_folder(capsys, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise ConfigError("too late")

    monkeypatch.setattr(opening, "open_trackers", broken)
    _, err = said(capsys, run_words(tmp_path / "a" / "b"), code=2)
    assert "too late" in err
    assert list(tmp_path.iterdir()) == []


# --- the rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "A:1;"', "JSON"),
        ('{"answer": "1"}', "prompt"),
        ('{"prompt": 7}', "prompt"),
        ("[]", "object"),
    ],
)
def test_a_malformed_row_is_refused_with_its_place_and_nothing_is_written(
    capsys, tmp_path, line, reason
):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "A:0;"}}\n{line}\n')
    _, err = said(capsys, run_words(tmp_path / "run", task=str(path)), code=2)
    assert f"{path}:2" in err
    assert reason in err
    assert not (tmp_path / "run").exists()


def test_prompts_beyond_the_context_are_left_out_with_their_count(capsys, tmp_path):
    rows = [{"prompt": "A:1;" * (70 if number % 3 == 0 else 1)} for number in range(12)]
    write_rows(tmp_path / "rows.jsonl", rows)
    words = run_words(tmp_path / "run", task=str(tmp_path / "rows.jsonl"))
    _, err = said(capsys, words)
    assert "4 of 12 prompts are skipped: they are longer than 255 tokens" in err
    assert sum(row["rollout/trajectories"] for row in metrics(tmp_path / "run")) == 8


def test_an_answer_ends_where_the_context_does(capsys, tmp_path):
    rows = [{"prompt": "x" * 250} for _ in range(8)]
    write_rows(tmp_path / "rows.jsonl", rows)
    said(capsys, run_words(tmp_path / "run", task=str(tmp_path / "rows.jsonl")))
    lengths = [row["tokens"] for row in events(tmp_path / "run") if row["event"] == "finish"]
    assert max(lengths) <= 6


def test_where_no_prompt_fits_that_is_said_and_nothing_is_written(capsys, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "x" * 300} for _ in range(8)])
    words = run_words(tmp_path / "run", task=str(tmp_path / "rows.jsonl"))
    _, err = said(capsys, words, code=2)
    assert "no prompt has at most" in err
    assert "255" in err
    assert "8 are longer" in err
    assert "use a model with a longer context" in err
    assert not (tmp_path / "run").exists()


# --- the model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["pad", "chat", "eos", "all"])
def test_a_tokenizer_may_lack_what_others_have(capsys, tmp_path, world, missing):
    """Nothing is padded, a chat template is used if there is one, and an answer may never end."""
    from transformers import AutoTokenizer, GenerationConfig

    model = shutil.copytree(world / "begun", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.chat_template is None
    if missing != "chat":
        tokenizer.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    if missing in ("pad", "all"):
        tokenizer.pad_token = None
    if missing in ("eos", "all"):
        tokenizer.eos_token = None
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
        GenerationConfig().save_pretrained(model)
    tokenizer.save_pretrained(model)
    words = run_words(tmp_path / "run", "--max-updates", "1", model=str(model))
    said(capsys, words)
    lengths = [row["tokens"] for row in events(tmp_path / "run") if row["event"] == "finish"]
    assert lengths
    assert (set(lengths) == {32}) == (missing in ("eos", "all"))
    AutoTokenizer.from_pretrained(tmp_path / "run" / "model")


@pytest.mark.parametrize("name", ["./nowhere", "tiny:hidden=33", "judge.py"])
def test_a_model_that_is_none_is_refused_and_nothing_is_written(capsys, tmp_path, name):
    _, err = said(capsys, run_words(tmp_path / "run", model=name), code=2)
    assert name.split(":")[0] in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


# --- the settings ---------------------------------------------------------------------------------

REFUSALS = [
    ("[schedule]\nmod = 'coupled'\n", "unknown key 'schedule.mod'; did you mean 'schedule.mode'?"),
    ("modell = 'tiny'\n", "unknown key 'modell'; did you mean 'model'?"),
    ("schedule = 3\n", "[schedule] must be a section"),
    ("epochs = 'many'\n", "epochs"),
    ("[schedule]\nmode = 'couplet'\n", "did you mean 'coupled'?"),
    ("[engine]\nslots = 0\n", "engine.slots must be at least 1, got 0"),
    ("epochs = 0\n", "epochs must be at least 1, got 0"),
    (
        "[algorithm]\nname = 'grpo'\n[schedule]\nsamples_per_prompt = 1\n",
        "samples_per_prompt must be at least 2, got 1",
    ),
    (
        "[algorithm]\nname = 'rloo'\n[schedule]\nharvest_unit = 'trajectory'\n",
        "schedule.harvest_unit must be 'prompt', got 'trajectory'",
    ),
    ("[schedule]\nupdate_batch = 4096\n", "lower update_batch or raise group_prompts"),
    ("[algorithm]\noverlong_tokens = 9999\n", "at most engine.max_tokens (8192), got 9999"),
    ("[evaluation]\ntarget = 0.5\n", "needs evaluation.tasks"),
    ("[optimiser]\nlearning_rate = -1.0\n", "optimiser.learning_rate must be at least 0, got -1.0"),
    ("[lora]\nrank = 0\n", "lora.rank must be at least 1, got 0"),
    ("[saving]\nkeep_last = 0\n", "saving.keep_last must be at least 1, got 0"),
    ("task = 'no_such_task'\n", "no_such_task"),
    ("not toml\n", "not TOML"),
]


def test_adapters_on_layers_that_are_not_there_are_refused(capsys, tmp_path):
    words = run_words(tmp_path / "run", "--lora.rank", "2", "--lora.targets", "no_layer")
    _, err = said(capsys, words, code=2)
    assert "lora.targets ['no_layer']" in err
    assert not (tmp_path / "run").exists()


def test_settings_that_cannot_work_are_refused_before_anything_heavy_is_loaded(tmp_path):
    """All in one process: if any of them loaded torch, it would be there at the end."""
    paths = []
    for number, (content, _) in enumerate(REFUSALS):
        paths.append(tmp_path / f"{number}.toml")
        paths[-1].write_text(content)
    script = """
import sys
from sortedrl.cli import main
for words in [[path] for path in sys.argv[1:]] + [["nowhere"], ["nowhere.toml"]]:
    try:
        code = main(["train", *words, "--out", "refused"])
    except SystemExit as stop:
        code = stop.code
    print("==== code", code, "torch" in sys.modules, file=sys.stderr, flush=True)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script, *map(str, paths)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={"PATH": "", "COLUMNS": "400"},
        timeout=300,  # settings that are not refused would be trained with
    )
    parts = ended.stderr.split("==== code")
    assert parts[1:] != []
    outcomes = [part.split("\n")[0] for part in parts[1:]]
    assert outcomes == [" 2 False"] * (len(REFUSALS) + 2)
    for part, (content, words) in zip(parts, REFUSALS, strict=False):
        assert words in part, content
    assert (
        "the first argument must be a .toml file or the folder of a run, got 'nowhere'" in parts[-3]
    )
    assert "nowhere.toml: cannot be read" in parts[-2]
    assert not (tmp_path / "refused").exists()
