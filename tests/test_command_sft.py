"""`sortedrl sft` from end to end: it learns to imitate, and leaves a model to train."""

import json
import shutil
import signal
from math import log

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from run_worlds import Nursery, later_wins, run_words, said, weights, write_world
from sortedrl.config.parsing import read_toml, settings_over
from sortedrl.config.train import SupervisedSettings
from sortedrl.core.files import read_metrics
from sortedrl.models.loading import load_tokenizer
from sortedrl.training import forward

MODEL = "tiny:hidden=32,layers=1,heads=2,context=256"
PUZZLES = "knights_knaves:people=2-3,count=64,style=compact"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The commands run in a folder of their own, and the number of threads is put back."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def sft_words(out, *more, task=PUZZLES, model=MODEL):
    return later_wins(
        *("sft", "--model", str(model), "--task", str(task), "--out", str(out), "--threads", "1"),
        *("--device", "cpu", "--batch-tokens", "1024", "--optimiser.learning-rate", "1e-2"),
        *more,
    )


def losses(out):
    return [row["loss"] for row in read_metrics(out / "metrics.jsonl")]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_it_learns_and_the_model_is_evaluated_and_trained_on(capsys, tmp_path):
    out, _ = said(capsys, sft_words(tmp_path / "warm", "--epochs", "8", "--json"))
    ending = json.loads(out)
    found = losses(tmp_path / "warm")
    assert ending["is_complete"] is True
    assert ending["steps"] == len(found)
    assert found[0] == pytest.approx(log(264), rel=0.1), "it begins by knowing nothing"
    assert ending["loss"] < found[0] / 2
    AutoModelForCausalLM.from_pretrained(tmp_path / "warm" / "model")
    model = tmp_path / "warm" / "model"
    words = [
        "--tasks",
        f"{PUZZLES},split=train",
        "--limit",
        "2",
        "--max-tokens",
        "8",
        "--workers",
        "1",
        "--json",
    ]
    out, _ = said(capsys, ["eval", model, *words])
    assert json.loads(out)["evaluations"][0]["rows"][0]["prompts"] == 2
    write_world(tmp_path)
    said(capsys, run_words(tmp_path / "run", "--max-updates", "1", model=model))
    assert weights(tmp_path / "run") != (model / "model.safetensors").read_bytes()


def test_the_seed_decides_everything(capsys, tmp_path):
    for name, seed in (("one", "1"), ("again", "1"), ("other", "2")):
        said(capsys, sft_words(tmp_path / name, "--seed", seed, "--max-steps", "2"))
    assert weights(tmp_path / "one") == weights(tmp_path / "again")
    assert weights(tmp_path / "one") != weights(tmp_path / "other")


def test_the_settings_are_kept_and_read_back_the_same(capsys, tmp_path):
    said(capsys, sft_words(tmp_path / "one", "--max-steps", "1", "--lora.rank", "2"))
    path = tmp_path / "one" / "config.toml"
    settings = settings_over(SupervisedSettings(), read_toml(path), path=path)
    assert (settings.model, settings.max_steps, settings.lora.rank) == (MODEL, 1, 2)
    said(capsys, ["sft", path, "--out", tmp_path / "two"])
    assert weights(tmp_path / "two") == weights(tmp_path / "one")


def test_only_the_responses_are_imitated(capsys, tmp_path):
    """The same responses after other prompts of the same length have the same number of losses."""
    rows = [{"prompt": "A:b;", "response": "xyz"}] * 4
    path = write_rows(tmp_path / "rows.jsonl", rows)
    out, _ = said(capsys, sft_words(tmp_path / "run", "--json", task=path))
    assert json.loads(out)["answer_tokens"] == 4 * len(["x", "y", "z", "<eos>"])


def test_adapters_are_folded_into_the_model_that_is_left(capsys, tmp_path):
    write_world(tmp_path)
    words = sft_words(tmp_path / "run", "--lora.rank", "2", "--max-steps", "3", model="begun")
    said(capsys, words)
    before = load_file(tmp_path / "begun" / "model.safetensors")
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed
    assert all("_proj.weight" in name for name in changed), "embeddings and norms are left alone"


@pytest.mark.parametrize("row", [{"completion": "x"}, {"response": ""}])
def test_a_row_without_a_response_is_refused_with_its_place(capsys, tmp_path, row):
    path = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "A:b;", "response": "x"}, {"prompt": "A:b;"} | row]
    )
    _, err = said(capsys, sft_words(tmp_path / "run", task=path), code=2)
    got = "''" if "response" in row else "only completion"
    assert f"{path}:2: supervised training needs a text in the field 'response', got {got};" in err
    assert not (tmp_path / "run").exists()


def test_rows_beyond_the_context_are_left_out_with_their_count(capsys, tmp_path):
    rows = [{"prompt": "A:b;", "response": "x" * (300 if n % 2 else 3)} for n in range(6)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    _, err = said(capsys, sft_words(tmp_path / "run", task=path))
    assert "3 of 6 rows are skipped: with their responses they are longer than 256 tokens" in err
    path = write_rows(tmp_path / "rows.jsonl", rows[1::2])
    _, err = said(capsys, sft_words(tmp_path / "none", task=path), code=2)
    assert "no row fits into the model's context of 256 tokens" in err
    assert not (tmp_path / "none").exists()


def test_few_steps_are_announced_with_what_makes_more(capsys, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "response": "b"}] * 3)
    _, err = said(capsys, sft_words(tmp_path / "out", "--epochs", "2", task=path))
    assert "batch_tokens = 1,024, so there will be 1 in all (lower it for more)" in err


def test_a_folder_that_holds_a_run_is_refused(capsys, tmp_path):
    said(capsys, sft_words(tmp_path / "run", "--max-steps", "1"))
    before = weights(tmp_path / "run")
    _, err = said(capsys, sft_words(tmp_path / "run"), code=2)
    assert "already holds a run; choose another folder (--out)" in err
    assert said(capsys, ["train", tmp_path / "run", "--resume"], code=2)[1]
    # The settings of a training run, in the folder of the supervised one.
    _, err = said(capsys, run_words(tmp_path / "run", "--resume"), code=2)
    assert "it is a run of sortedrl sft" in err
    assert weights(tmp_path / "run") == before


def test_a_model_without_weights_is_refused_and_nothing_is_written(capsys, tmp_path):
    write_world(tmp_path)
    (tmp_path / "begun" / "model.safetensors").unlink()
    _, err = said(capsys, sft_words(tmp_path / "run", model="begun"), code=2)
    assert "begun as a causal language model" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nowhere"], "the first argument must be a .toml file, got 'nowhere'"),
        (["--epochs", "0"], "epochs must be at least 1, got 0"),
        (["--optimiser.mini-batches", "2"], "set batch_tokens and epochs"),
        (["--optimiser.schedule", "cosinus"], "did you mean 'cosine'?"),
        (["--model", "tiny:hiden=3"], "did you mean 'hidden'?"),
    ],
)
def test_what_cannot_work_is_refused(capsys, tmp_path, words, reason):
    _, err = said(capsys, ["sft", *words], code=2)
    assert reason in " ".join(err.split())
    assert not list(tmp_path.iterdir())


def test_losses_that_are_not_finite_stop_it(capsys, tmp_path):
    words = ["--optimiser.learning-rate", "1e30", "--optimiser.max-bad-updates", "2"]
    words += ["--optimiser.warmup-steps", "0", "--epochs", "3"]
    _, err = said(capsys, sft_words(tmp_path / "run", *words), code=2)
    assert "2 steps in a row had a loss or a gradient that is not finite" in err


def test_ctrl_c_keeps_what_was_learnt(tmp_path):
    write_world(tmp_path)
    shutil.copytree(tmp_path / "begun", tmp_path / "model")
    with Nursery(tmp_path) as nursery:
        child = nursery.start(sft_words(tmp_path / "run", "--epochs", "999", model="model"))
        metrics = tmp_path / "run" / "metrics.jsonl"
        assert child.until(lambda: metrics.exists() and metrics.stat().st_size > 0)
        child.signal(signal.SIGINT)
        assert child.wait() == 130, child.err
        assert "stopping" in child.err
        assert weights(tmp_path / "run") != (tmp_path / "model" / "model.safetensors").read_bytes()


def test_a_disk_that_is_full_at_the_end_is_told_and_what_was_logged_stays(tmp_path):
    write_world(tmp_path)
    with Nursery(tmp_path) as nursery:
        words = sft_words(tmp_path / "run", "--max-steps", "2", model="begun")
        child = nursery.start(words, file_bytes=20_000)
        assert child.wait() == 2, child.err
    assert "run/model: the trained model cannot be written: File too large; " in child.err
    assert "Traceback" not in child.err
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {"run.json", "config.toml", "metrics.jsonl"}
    assert len(losses(tmp_path / "run")) == 2


def test_a_disk_without_room_for_the_model_is_refused_before_training(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 100))
    _, err = said(capsys, sft_words(tmp_path / "run"), code=2)
    assert "run: must have room for the trained model of 0 MiB" in " ".join(err.split())
    assert not (tmp_path / "run").exists()


def test_a_gguf_file_is_trained_on_answers_that_end_as_it_says(capsys, tmp_path, gguf_file):
    rows = [{"prompt": "who lies?", "response": "he"} for _ in range(8)]
    task = write_rows(tmp_path / "rows.jsonl", rows)
    for name, words in (("plain", ()), ("lora", ("--lora.rank", "2"))):
        more = (*words, "--epochs", "20", "--batch-tokens", "32")
        said(capsys, sft_words(tmp_path / name, *more, task=task, model=gguf_file))
        assert "quant" not in (tmp_path / name / "model" / "config.json").read_text()
        assert losses(tmp_path / name)[-1] < losses(tmp_path / name)[0] / 2
    model, tokenizer = (
        load(tmp_path / "plain" / "model")
        for load in (AutoModelForCausalLM.from_pretrained, load_tokenizer)
    )
    prompt = tokenizer.encode("who lies?", return_tensors="pt")
    answer = model.generate(prompt, do_sample=False, max_new_tokens=8)[0, prompt.shape[1] :]
    assert tokenizer.decode(answer) == "he<end>"


def test_layers_are_compiled_where_it_is_asked_for(capsys, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(forward, "compiled_layers", lambda model: compiled.append(model) or {})
    for number, choice in enumerate(("None", "False", "True")):
        words = sft_words(tmp_path / str(number), "--passes.compiled", choice, "--max-steps", "1")
        said(capsys, words)
        assert len(compiled) == (choice == "True"), "by default only on a GPU"
