"""`sortedrl train` from end to end: what it leaves behind, what it says, when it ends."""

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers.modeling_utils
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from forked import run_command
from run_worlds import TASK, checkpoints, events, metrics, run_words, said, weights, write_world
from sortedrl.models.loading import load_model
from sortedrl.runs import opening
from sortedrl.training.batch import TokenSequence
from sortedrl.training.forward import PackedModel

HELD_OUT = "knights_knaves:people=2-3,count=8,style=compact,split=test"
SEQUENCES = [TokenSequence([65, 58, 49], [70, 71, 72, 90]), TokenSequence([80], [81, 82])]


pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def made(monkeypatch):
    """The parts of the runs, as the command has made them."""
    kept, make = [], opening.training_parts

    def spy(*arguments, **more):
        kept.append(make(*arguments, **more))
        return kept[-1]

    monkeypatch.setattr(opening, "training_parts", spy)
    return kept


def logprobs(model):
    with torch.no_grad():
        return PackedModel(model).logprobs(SEQUENCES).logprobs_T


# --- the model it leaves --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), id="plain"),
        pytest.param(("--lora.rank", "4"), id="lora"),
        pytest.param(("--precision", "bfloat16"), id="bfloat16"),
    ],
)
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_model_is_one_for_transformers_and_says_what_the_trainer_says(
    capsys, tmp_path, world, made, words, is_tied
):
    model = shutil.copytree(world / "begun", tmp_path / "model")
    if not is_tied:
        config = AutoConfig.from_pretrained(model)
        config.tie_word_embeddings = False
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
    said(capsys, run_words(tmp_path / "run", *words, "--max-updates", "3", model=str(model)))
    (parts,) = made
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert exported.dtype == parts.trainer.model.dtype
    tied = exported.get_output_embeddings().weight is exported.get_input_embeddings().weight
    assert tied == is_tied
    of_trainer, of_exported = logprobs(parts.trainer.model), logprobs(exported)
    before = logprobs(AutoModelForCausalLM.from_pretrained(model, dtype=exported.dtype))
    tolerance = 1e-5 if exported.dtype == torch.float32 else 2e-2
    assert not torch.allclose(of_trainer, before, atol=2 * tolerance), "it must have learnt"
    if "--lora.rank" in words:
        torch.testing.assert_close(of_exported, of_trainer, atol=tolerance, rtol=0)
    else:
        assert torch.equal(of_exported, of_trainer)
    assert not any(".lora_" in name for name, _ in exported.named_parameters())
    AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    said(capsys, run_words(tmp_path / "next", "--max-updates", "1", model=tmp_path / "run/model"))


@pytest.mark.parametrize("words", [(), ("--lora.rank", "2", "--algorithm.kl-coef", "0.1")])
def test_a_gguf_file_is_trained_saved_resumed_and_trained_on(capsys, tmp_path, gguf_file, words):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    said(capsys, run_words(whole, *words, "--max-updates", "3", model=gguf_file))
    said(capsys, run_words(cut, *words, "--max-updates", "1", model=gguf_file))
    said(capsys, ["train", cut, "--resume", "--max-updates", "3"])
    assert weights(cut) == weights(whole)
    for config in (whole / "model", *(one / "model" for one in checkpoints(whole))):
        assert "quant" not in (config / "config.json").read_text()
    before = load_model(gguf_file, dtype=None, device="cpu").state_dict()
    after = AutoModelForCausalLM.from_pretrained(whole / "model").state_dict()
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    said(capsys, run_words(tmp_path / "next", "--max-updates", "1", model=whole / "model"))


def test_gradient_checkpointing_computes_twice_and_changes_nothing(capsys, tmp_path, monkeypatch):
    calls, recompute = [], transformers.modeling_utils.checkpoint

    def counted(*arguments, **more):
        calls.append(None)
        return recompute(*arguments, **more)

    monkeypatch.setattr(transformers.modeling_utils, "checkpoint", counted)
    said(capsys, run_words(tmp_path / "off"))
    assert not calls
    said(capsys, run_words(tmp_path / "on", "--passes.gradient-checkpointing"))
    assert calls
    assert weights(tmp_path / "on") == weights(tmp_path / "off")
    assert metrics(tmp_path / "on") == metrics(tmp_path / "off")


def test_fewer_tokens_in_a_pass_change_nothing_but_rounding(capsys, tmp_path):
    for name, tokens in (("many", "16384"), ("few", "64")):
        said(
            capsys,
            run_words(tmp_path / name, "--passes.micro-batch-tokens", tokens, "--max-updates", "1"),
        )
    first, second = metrics(tmp_path / "many"), metrics(tmp_path / "few")
    assert first[0]["grad_norm"] == pytest.approx(second[0]["grad_norm"], rel=1e-4)
    assert first[0]["fill"] < second[0]["fill"]


def test_masters_in_fp32_learn_what_16_bits_would_lose(capsys, tmp_path):
    """Steps far smaller than a bfloat16 step add up, also over a stop."""
    words = ("--precision", "bfloat16", "--optimiser.learning-rate", "1e-5")
    said(capsys, run_words(tmp_path / "whole", *words))
    said(capsys, run_words(tmp_path / "cut", *words, "--max-updates", "3"))
    said(capsys, ["train", tmp_path / "cut", "--resume", "--max-updates", "99"])
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    last = [checkpoints(tmp_path / name)[-1] for name in ("whole", "cut")]
    masters = [(one / "optimiser.safetensors").read_bytes() for one in last]
    assert masters[0] == masters[1]
    assert b"master." in masters[0]


# --- evaluations, and when it ends ----------------------------------------------------------------


def evaluated(right, *more):
    """The words of a run with evaluations of two answers each; `right` are the right ones."""
    return (
        *("--evaluation.tasks", HELD_OUT, "--evaluation.limit", "2"),
        *("--reward-options", f"right={json.dumps(right)}"),
        *more,
    )


def scores(out):
    return {
        row["update"]: row["evaluation/score"] for row in metrics(out) if "evaluation/score" in row
    }


def test_the_model_is_evaluated_before_the_first_update_now_and_then_and_at_the_end(
    capsys, tmp_path
):
    words = evaluated([1, 5, 6, 7], "--evaluation.every", "2", "--max-updates", "5")
    _, err = said(capsys, run_words(tmp_path / "run", *words, reward="scripted"))
    assert scores(tmp_path / "run") == {0: 0.5, 2: 0, 4: 1, 5: 0.5}
    assert re.search(rf"^after update 4: 100\.0 %, reward 0\.\d+  {HELD_OUT[:30]}", err, re.M)
    said(capsys, run_words(tmp_path / "without", "--max-updates", "5"))
    assert weights(tmp_path / "run") == weights(tmp_path / "without"), "questions change nothing"


def test_the_last_checkpoints_are_kept_and_the_best(capsys, tmp_path):
    words = evaluated([5, 6, 9], "--evaluation.every", "1", "--saving.keep-last", "2")
    said(capsys, run_words(tmp_path / "run", *words, "--max-updates", "5", reward="scripted"))
    assert scores(tmp_path / "run") == {0: 0, 1: 0, 2: 1, 3: 0, 4: 0.5, 5: 0}
    kept = [one.name for one in checkpoints(tmp_path / "run")]
    assert kept == ["update-000002", "update-000004", "update-000005"]
    words = (*words, "--saving.no-keep-best")
    said(capsys, run_words(tmp_path / "last", *words, "--max-updates", "5", reward="scripted"))
    kept = [one.name for one in checkpoints(tmp_path / "last")]
    assert kept == ["update-000004", "update-000005"]


def test_it_ends_as_soon_as_the_target_is_reached(capsys, tmp_path):
    words = evaluated([3, 5, 6], "--evaluation.every", "1", "--evaluation.target", "0.9")
    out, _ = said(capsys, run_words(tmp_path / "run", *words, "--json", reward="scripted"))
    ending = json.loads(out)
    assert (ending["reason"], ending["updates"]) == ("target", 2)
    assert ending["first_scores"] == {HELD_OUT: 0}
    assert ending["last_scores"] == {HELD_OUT: 1}
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_a_model_that_is_good_enough_is_not_trained(capsys, tmp_path, world):
    words = evaluated([1, 2], "--evaluation.target", "0.9")
    out, _ = said(capsys, run_words(tmp_path / "run", *words, reward="scripted"))
    assert "reached the target score" in out
    assert weights(tmp_path / "run") == (world / "begun" / "model.safetensors").read_bytes()
    said(capsys, ["train", tmp_path / "run", "--resume"])


def test_it_ends_after_max_updates_and_goes_on_with_more(capsys, tmp_path):
    out, _ = said(capsys, run_words(tmp_path / "run", "--max-updates", "2", "--json"))
    assert (json.loads(out)["reason"], json.loads(out)["updates"]) == ("updates", 2)
    again = ["train", tmp_path / "run", "--resume", "--json"]
    out, _ = said(capsys, [*again, "--max-updates", "4"])
    assert (json.loads(out)["reason"], json.loads(out)["updates"]) == ("updates", 4)
    out, _ = said(capsys, [*again, "--max-updates", "99"])
    assert json.loads(out)["reason"] == "data"
    said(capsys, run_words(tmp_path / "whole"))
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert events(tmp_path / "run") == events(tmp_path / "whole")


def test_a_run_that_has_ended_ends_again_without_a_change(capsys, tmp_path):
    said(capsys, run_words(tmp_path / "run"))
    before = weights(tmp_path / "run"), metrics(tmp_path / "run"), events(tmp_path / "run")
    out, _ = said(capsys, ["train", tmp_path / "run", "--resume"])
    assert "reached the end of the data" in out
    assert before[:2] == (weights(tmp_path / "run"), metrics(tmp_path / "run"))
    assert [e for e in events(tmp_path / "run") if e["event"] != "end"] == before[2][:-1]


def test_a_run_that_has_ended_goes_on_with_more_epochs(capsys, tmp_path):
    said(capsys, run_words(tmp_path / "run"))
    out, _ = said(capsys, ["train", tmp_path / "run", "--resume", "--epochs", "2", "--json"])
    assert json.loads(out)["trajectories"] == 48
    said(capsys, run_words(tmp_path / "whole", "--epochs", "2"))
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


# --- what it says ---------------------------------------------------------------------------------


def test_json_is_one_object_and_nothing_else_on_standard_output(world, tmp_path):
    """In a process of its own, where nothing is captured on the way."""
    words = run_words(tmp_path / "run", "--json", "--max-updates", "2")
    ended = run_command(*words, folder=world)
    found = json.loads(ended.stdout)
    assert (found["reason"], found["updates"]) == ("updates", 2)
    assert found["folder"] == str(tmp_path / "run")
    lines = [line for line in ended.stderr.splitlines() if line.startswith("update ")]
    assert [line.split()[1] for line in lines] == ["1", "2"]
    for word in ("reward", "length", "bubble", "/s", "left"):
        assert word in lines[0]
    assert "\x1b" not in ended.stderr, "no colours and no live panel where nobody looks"


def test_the_table_at_the_end_says_where_the_model_is(capsys, tmp_path):
    run = tmp_path / "my run"
    out, _ = said(capsys, run_words(run, "--max-updates", "1"))
    for words in ("updates", "bubble", "goodput", "staleness", "reached max_updates"):
        assert words in out
    assert f"The model is in {run / 'model'}" in out
    assert f"to train longer: sortedrl train '{run}' --resume --max-updates N\n" in out


def test_tensorboard_has_the_numbers_of_every_update_once(capsys, tmp_path):
    asked = ("--tracking.tensorboard",)
    said(capsys, run_words(tmp_path / "run", "--max-updates", "2", *asked))
    said(capsys, ["train", tmp_path / "run", "--resume", "--max-updates", "4"])
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    shown = [(point.step, pytest.approx(point.value)) for point in board.Scalars("reward/mean")]
    assert shown == [(row["update"], row["reward/mean"]) for row in metrics(tmp_path / "run")]


def test_a_file_and_flags_mean_the_same(capsys, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(
        f'model = "begun"\ntask = "{TASK}"\nreward = "judge.py:letters"\nthreads = 1\n'
        f'out = "{tmp_path / "file"}"\nmax_updates = 2\ndevice = "cpu"\n'
        "[rewards]\nworkers = 1\n[engine]\nslots = 6\nmax_tokens = 32\n"
        "[schedule]\ngroup_prompts = 8\nupdate_batch = 4\n"
        "[optimiser]\nlearning_rate = 1e-2\n[saving]\nevery = 50\n"
    )
    said(capsys, ["train", path, "--saving.every", "1"])
    said(capsys, run_words(tmp_path / "flags", "--max-updates", "2"))
    assert weights(tmp_path / "file") == weights(tmp_path / "flags")
    first, second = ((tmp_path / name / "config.toml").read_text() for name in ("file", "flags"))
    assert first.replace('/file"', '/flags"') == second


# --- the dry run ----------------------------------------------------------------------------------


def test_a_dry_run_needs_no_weights_and_leaves_nothing(capsys, tmp_path, world):
    model = shutil.copytree(world / "begun", tmp_path / "model")
    (model / "model.safetensors").unlink()
    words = run_words(tmp_path / "run", "--dry-run", model=str(model))
    out, _ = said(capsys, words)
    for word in ("model", "weights", "moments", "cache", "schedule", "bounds", "predicted"):
        assert any(line.startswith(word) for line in out.splitlines()), word
    assert not (tmp_path / "run").exists()
    out, _ = said(capsys, [*words, "--json"])
    plan = json.loads(out)
    assert plan["fits"] is True
    assert plan["prediction"]["schedule"]["prompts"] == 24


def test_a_dry_run_refuses_what_cannot_fit_and_says_what_would(capsys, tmp_path, world):
    model = shutil.copytree(world / "begun", tmp_path / "model")
    (model / "model.safetensors").unlink()
    config = json.loads((model / "config.json").read_text())
    big = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    (model / "config.json").write_text(json.dumps({**config, **big, **heads}))
    words = run_words(tmp_path / "run", "--dry-run", "--card", "rtx-4090", model=str(model))
    out, err = said(capsys, words, code=2)
    assert "It does not fit. Changes that would make it fit:" in out
    assert err.startswith("sortedrl: ")
    out, _ = said(capsys, [*words, "--json"], code=2)
    assert json.loads(out)["fits"] is False
    assert not (tmp_path / "run").exists()


def test_the_folders_of_a_run_are_where_they_are_said_to_be(capsys, tmp_path):
    said(capsys, run_words(tmp_path / "run", "--max-updates", "1"))
    found = {path.name for path in Path(tmp_path / "run").iterdir()}
    assert found == {
        *(
            "run.json",
            "config.toml",
            "events.jsonl",
            "metrics.jsonl",
            "answers.jsonl",
            "checkpoints",
            "model",
        ),
    }


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_not_installed_is_refused_before_anything_is_loaded(
    tmp_path, capsys, monkeypatch, engine
):
    if find_spec(engine) is not None:
        pytest.skip(f"{engine} is installed")
    monkeypatch.chdir(tmp_path)
    write_world(tmp_path)
    words = run_words("out", "--rollout.engine", engine, model="no-such-model")
    _, err = said(capsys, words, code=2)
    assert f"pip install 'sortedrl[{engine}]'" in err
    assert not (tmp_path / "out").exists()


def test_a_server_that_is_not_there_is_refused_with_its_address(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_world(tmp_path)
    url = "http://127.0.0.1:9"
    words = run_words("out", "--rollout.engine", "servers", "--rollout.urls", url)
    _, err = said(capsys, words, code=2)
    assert f"{url} does not respond" in err
    assert "start a vLLM or SGLang server there first" in err
