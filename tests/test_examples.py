"""The examples run as they are shown."""

import ast
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forked import run_script
from native_worlds import tiny_model
from sortedrl.cli import main
from sortedrl.config.parsing import read_toml, settings_over
from sortedrl.config.train import SupervisedSettings, TrainSettings
from sortedrl.core.files import read_metrics

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model on disk that speaks in numbers."""
    words = {str(number): number for number in range(128)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    tiny_model(eos_token_id=7).save_pretrained(path)
    return path


def test_generate_writes_two_answers_to_each_prompt(folder):
    done = run_script(EXAMPLES / "generate.py", folder, "1 2 3", "4 5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("> 1 2 3\n") == done.stdout.count("> 4 5\n") == 2
    assert done.stdout.count(" tokens, ") == 4
    assert "4/4 answers" in done.stderr


def test_a_reward_of_ones_own_is_tried_out_and_a_call_that_hangs_is_ended():
    done = run_script(EXAMPLES / "own_reward.py")
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["0.991", "scored"],
        ["-0.017", "scored"],
        ["-1.000", "timeout"],
    ]
    assert "it took more than 1 seconds; the answer gets the reward -1" in done.stderr


def settings_in(name, kind):
    return settings_over(kind(), read_toml(EXAMPLES / name), path=Path(name))


def test_the_files_are_settings_and_the_second_goes_on_from_the_first():
    warm = settings_in("sft.toml", SupervisedSettings)
    train = settings_in("train.toml", TrainSettings)
    assert train.model == str(warm.out / "model")
    assert (train.schedule.mode, warm.optimiser.schedule) == ("coupled", "cosine")


def test_a_warm_start_and_training_run_from_their_files(tmp_path, monkeypatch, capsys):
    """Shortened: fewer rows, and a model that has nothing to say yet."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    puzzles = "knights_knaves:people=2,style=compact"
    warm = ["--model", "tiny:hidden=32,layers=1", "--max-steps", "2", "--batch-tokens", "256"]
    assert main(["sft", str(EXAMPLES / "sft.toml"), "--task", f"{puzzles},count=24", *warm]) == 0
    train = ["--schedule.group-prompts", "8", "--schedule.update-batch", "4"]
    train += ["--engine.slots", "4", "--engine.max-tokens", "8", "--max-updates", "2"]
    train += ["--evaluation.tasks", f"{puzzles},count=2,split=test"]
    train += ["--task", f"{puzzles},count=16"]
    assert main(["train", str(EXAMPLES / "train.toml"), *train]) == 0
    torch.set_num_threads(threads)
    assert "2 steps in " in capsys.readouterr().out
    rows = read_metrics(tmp_path / "runs" / "train" / "metrics.jsonl")
    assert [row["update"] for row in rows] == [0, 1, 2, 2], "scores before the first and at the end"
    for folder in ("warm", "train"):
        assert (tmp_path / "runs" / folder / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "trained"),
    [
        (["gsm8k_grpo.toml", "--rows", "7473", "--prompt-tokens", "110"], "all of them trained"),
        (
            ["gsm8k_grpo.toml", "--rows", "99", "--prompt-tokens", "9", "--engine", "vllm"],
            "own weights",
        ),
        (["lora_7b.toml", "--rows", "7473", "--prompt-tokens", "110"], "adapters of rank 32"),
        (["judge.toml", "--rows", "1000", "--prompt-tokens", "60"], "all of them trained"),
    ],
)
def test_an_example_for_a_gpu_fits_on_the_card_that_it_names(words, trained, capsys):
    name, *flags = words
    assert main(["train", str(EXAMPLES / name), "--dry-run", "--card", "h100", *flags]) == 0
    plan = capsys.readouterr().out
    assert "predicted" in plan
    assert trained in plan


def test_every_example_says_what_it_needs_how_long_it_takes_and_what_it_gives():
    for path in [*EXAMPLES.glob("*.toml"), *EXAMPLES.glob("*.py")]:
        head = path.read_text()[:1500]
        assert all(word in head for word in ("Needs:", "Takes:", "Gives:")), path.name


@pytest.mark.parametrize("name", ["tools", "questions"])
def test_the_examples_of_conversations_run_from_their_files(name, tmp_path, monkeypatch):
    """Shortened: few steps, so that nothing is learned."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    assert run_script(EXAMPLES / f"{name}_data.py").returncode == 0
    warm = settings_in(f"{name}_warm.toml", SupervisedSettings)
    train = settings_in(f"{name}.toml", TrainSettings)
    assert train.model == str(warm.out / "model")
    assert main(["sft", str(EXAMPLES / f"{name}_warm.toml"), "--max-steps", "2"]) == 0
    short = ["--max-updates", "2", "--schedule.update-batch", "8", "--schedule.group-prompts", "8"]
    tasks = [word.replace("count=1280", "count=32") for word in ("--task", train.task)]
    if train.evaluation.tasks:
        tasks += ["--evaluation.tasks", train.evaluation.tasks[0].replace("count=128", "count=2")]
    assert main(["train", str(EXAMPLES / f"{name}.toml"), *short, *tasks]) == 0
    torch.set_num_threads(threads)
    rows = read_metrics(tmp_path / train.out / "metrics.jsonl")
    assert [row["update"] for row in rows if "reward/mean" in row] == [1, 2]


def test_a_scheduler_in_a_loop_of_ones_own_learns():
    done = run_script(EXAMPLES / "own_loop.py")
    assert done.returncode == 0, done.stderr
    rewards = [float(line.split()[3]) for line in done.stdout.splitlines()]
    assert len(rewards) >= 10
    assert sum(rewards[-5:]) / 5 > 2 * sum(rewards[:3]) / 3


def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path, monkeypatch):
    """Without Jupyter: the cells in order, and what the last line of each gives."""
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text())["cells"]
    names, given = {"__name__": "__main__"}, []
    for number, cell in enumerate(cell for cell in cells if cell["cell_type"] == "code"):
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"cell {number}", "exec"), names)
        if last is not None:
            given.append(eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names))
    run, numbers, page, rewards, comparison = given
    assert run.folder == Path("runs/train")
    assert len(numbers) == 8
    assert page.exists()
    assert rewards[1] > rewards[0]
    assert comparison.gain > 1


def test_the_notebook_is_kept_without_outputs():
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text())
    assert all(cell["outputs"] == [] for cell in notebook["cells"] if cell["cell_type"] == "code")
