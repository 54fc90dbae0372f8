"""`sortedrl eval` from end to end, on tiny models and real worker processes."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from knights_reading import ALPHABET
from native_worlds import tiny_model
from sortedrl.cli import main
from sortedrl.evaluation import statistics
from sortedrl.evaluation.results import read_results

FUNCTIONS = str(Path(__file__).with_name("reward_functions.py"))
PUZZLES = "knights_knaves:people=2-3,count=6,style=compact,split=test"


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 400)


def save_model(folder, *, seed):
    words = ["<pad>", *ALPHABET]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tiny_model(vocab_size=len(words), seed=seed).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def two_models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return save_model(root / "before", seed=0), save_model(root / "after", seed=1)


@pytest.fixture
def evaluated(capsys, tmp_path, monkeypatch):
    """Runs an evaluation in an empty folder, and gives its JSON."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        words = ["eval", *words, "--json", "--workers", "1", "--slots", "4", "--max-tokens", "12"]
        assert main(words) == 0
        return json.loads(capsys.readouterr().out)

    return run


def refused(capsys, *words):
    try:
        code = main(["eval", *words])
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    return " ".join(err.split())


def test_a_model_is_evaluated_on_several_tasks_and_every_answer_is_kept(evaluated, two_models):
    other = "knights_knaves:people=2-2,count=2,style=compact"
    result = evaluated(two_models[0], "--tasks", PUZZLES, other, "--samples", "2")
    kept = read_results(Path("evals/before"))
    assert Counter(answer.task for answer in kept.answers) == {PUZZLES: 12, other: 4}
    assert {(a.prompt_id, a.sample_index) for a in kept.answers if a.task == PUZZLES} == {
        (p, s) for p in range(6) for s in range(2)
    }
    (only,) = result["evaluations"]
    names = [(row["task"], row["level"], row["prompts"]) for row in only["rows"]]
    assert names == [
        (PUZZLES, None, 6),
        (PUZZLES, "2", 3),
        (PUZZLES, "3", 3),
        (other, None, 2),
        ("macro average", None, None),
    ]
    assert Path("evals/before/page.html").read_text().startswith("<!DOCTYPE html>")
    assert json.loads(Path("evals/before/summary.json").read_text())["label"] == "before"


def test_a_reward_of_the_users_own_decides(evaluated, two_models, tmp_path):
    rows = tmp_path / "mine.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "A:b;", "answer": "x"}) + "\n" for _ in range(3)))
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def reward(prompt, response):\n"
        "    return {'reward': len(response), 'correct': prompt.fields['place'].endswith(':2')}\n"
    )
    result = evaluated(two_models[0], "--tasks", str(rows), "--reward", f"{mine}:reward")
    (row,) = result["evaluations"][0]["rows"]
    assert row["mean"] == pytest.approx(1 / 3)
    kept = {a.prompt_id: a for a in read_results(Path("evals/before")).answers}
    assert [kept[i].is_correct for i in range(3)] == [False, True, False]
    assert kept[0].reward == len(kept[0].response)


def test_two_models_are_compared_prompt_by_prompt(evaluated, two_models):
    words = ["--tasks", PUZZLES, "--reward", f"{FUNCTIONS}:starts_with_a_capital"]
    both = evaluated(*two_models, *words)
    (comparison,) = both["comparisons"]
    assert (comparison["before"], comparison["after"]) == ("before", "after")
    whole = comparison["rows"][0]
    assert whole["prompts"] == 6
    assert whole["better"] + whole["worse"] + whole["equal"] == 6
    before, after = (e["rows"][0]["mean"] for e in both["evaluations"])
    assert whole["mean_change"] == pytest.approx(after - before)
    assert Path("evals/before-and-after.html").exists()
    assert evaluated("evals/before", "evals/after") == both


def test_two_evaluations_of_one_model_are_told_apart(evaluated, two_models):
    for seed in ("0", "1"):
        words = ["--tasks", PUZZLES, "--samples", "2", "--seed", seed, "--out", f"seed{seed}"]
        evaluated(two_models[0], *words)
    both = evaluated("seed0/before", "seed1/before")
    assert [e["label"] for e in both["evaluations"]] == ["seed0-before", "seed1-before"]
    assert Path("evals/seed0-before-and-seed1-before.html").exists()


def test_the_models_of_runs_are_called_after_their_runs(evaluated, two_models, capsys, tmp_path):
    runs = []
    for name, model in zip(("a", "b"), two_models, strict=True):
        (tmp_path / name).mkdir()
        runs.append(tmp_path / name / "model")
        runs[-1].symlink_to(model)
    evaluated(str(runs[1]), "--tasks", PUZZLES)
    assert Path("evals/b-model/page.html").exists()
    # Refused before the first model is evaluated.
    assert "evals/b-model: already holds 6" in refused(capsys, *map(str, runs), "--tasks", PUZZLES)
    (tmp_path / "b" / "run.json").touch()
    words = (str(runs[0]), str(tmp_path / "b"), "--tasks", PUZZLES)
    assert f"is the folder of a run; its model is {runs[1]}" in refused(capsys, *words)
    assert not Path("evals/a-model").exists()


def test_a_model_that_was_trained_on_is_not_resumed(evaluated, capsys, tmp_path):
    model = save_model(tmp_path / "run" / "model", seed=0)
    words = (model, "--tasks", PUZZLES)
    first = evaluated(*words)
    assert evaluated(*words, "--resume") == first
    save_model(tmp_path / "run" / "model", seed=1)
    again = refused(capsys, *words, "--resume", "--max-tokens", "12")
    assert "the weights of the model have changed; choose another folder" in again
    old = Path("evals/run-model/summary.json")  # of before there were fingerprints
    head = json.loads(old.read_text())
    assert head["settings"].pop("weights")
    old.write_text(json.dumps(head, indent=2))
    assert evaluated(*words, "--resume") == first


def test_the_same_seed_gives_the_same_answers_whatever_else_is_asked(evaluated, two_models):
    def answers(*words):
        evaluated(two_models[0], *words, "--samples", "2")
        kept = read_results(Path(words[words.index("--out") + 1]) / "before").answers
        return {(a.prompt_id, a.sample_index): a.response for a in kept if a.task == PUZZLES}

    alone = answers("--tasks", PUZZLES, "--out", "a")
    assert (
        answers("--tasks", "knights_knaves:count=5,style=compact", PUZZLES, "--out", "b") == alone
    )
    assert answers("--tasks", PUZZLES, "--seed", "1", "--out", "c") != alone
    fewer = answers("--tasks", PUZZLES, "--limit", "2", "--out", "d")
    assert fewer == {key: alone[key] for key in fewer}
    assert len(fewer) == 4


def test_a_run_that_was_cut_off_goes_on(evaluated, two_models):
    words = [two_models[0], "--tasks", PUZZLES, "--samples", "2"]
    whole = evaluated(*words, "--out", "whole")
    evaluated(*words, "--out", "cut")
    samples = Path("cut/before/samples.jsonl")
    lines = samples.read_text().splitlines(keepends=True)
    samples.write_text("".join(lines[:5]) + lines[5][:20])
    assert evaluated(*words, "--out", "cut", "--resume") == whole
    assert len(samples.read_text().splitlines()) == 12
    assert sorted(samples.read_text().splitlines()[:5]) == sorted(s.strip() for s in lines[:5])


def test_more_can_be_asked_later(evaluated, two_models):
    words = [two_models[0], "--temperature", "0.6"]
    other = "knights_knaves:people=2-2,count=2,style=compact"
    evaluated(*words, "--tasks", PUZZLES, "--samples", "1", "--limit", "3")
    more = evaluated(*words, "--tasks", PUZZLES, other, "--samples", "2", "--resume")
    whole = evaluated(*words, "--tasks", PUZZLES, other, "--samples", "2", "--out", "whole")
    assert more == whole


def test_an_answer_whose_reward_fails_is_wrong_and_counted(evaluated, two_models, capsys):
    words = ["--tasks", PUZZLES, "--limit", "2", "--reward", f"{FUNCTIONS}:hangs"]
    words += ["--time-limit-seconds", "0.1"]
    result = evaluated(two_models[0], *words)
    row = result["evaluations"][0]["rows"][0]
    assert row["mean"] == 0.0
    assert row["failures"] == {"timeout": 2}
    assert len(Path("evals/before/reward-failures.jsonl").read_text().splitlines()) == 2


def test_the_values_of_a_reward_can_be_set(evaluated, two_models):
    words = ["--tasks", PUZZLES, "--reward-options", "format_wrong=-5", "unparsable=-7"]
    rows = evaluated(two_models[0], *words)["evaluations"][0]["rows"]
    assert rows[0]["reward"] == -12.0


@pytest.mark.parametrize(
    ("function", "failures"), [("exits", {"died": 2}), ("eats", {"memory": 2})]
)
def test_what_a_failing_reward_costs_is_told(evaluated, two_models, function, failures):
    words = ["--tasks", PUZZLES, "--reward", f"{FUNCTIONS}:{function}", "--memory-gib", "0.25"]
    words += ["--limit", "2"]
    rows = evaluated(two_models[0], *words)["evaluations"][0]["rows"]
    assert rows[0]["failures"] == failures
    assert rows[0]["mean"] == 0.0
    page = Path("evals/before/page.html").read_text()
    assert "scoring failed for 2 answers, counted as wrong" in page


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", "ZeroDivisionError: division by zero"),
        ("nan", "gave no reward for answer 0 to prompt"),
        ("text", "a reward must be a number or named parts, got 'good'"),
    ],
)
def test_a_reward_that_cannot_be_trusted_stops_the_evaluation_and_keeps_the_answer(
    function, words, two_models, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    given = [two_models[0], "--tasks", PUZZLES, "--reward", f"{FUNCTIONS}:{function}"]
    assert words in refused(capsys, *given, "--workers", "1")
    saved = json.loads(Path("evals/before/reward-error.json").read_text())
    assert saved["answers"][0]["fields"]["level"] in (2, 3)


def test_the_table_is_for_people(two_models, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *two_models, "--tasks", PUZZLES, "--max-tokens", "4"]) == 0
    printed = capsys.readouterr().out
    assert "mean@1" in printed
    assert "before vs after, paired by prompt" in printed
    assert "note: before" in printed
    assert "only 0.0 % of the responses give an answer in the requested format" in printed


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "give at least one model"),
        (["some/model"], "give at least one task"),
        (["some/model", "--tasks", "gsm9k"], "did you mean 'gsm8k'"),
        (["some/model", "--tasks", PUZZLES, PUZZLES], "each task can be given once"),
        (["some/model", "some/model", "--tasks", PUZZLES], "each model can be given once"),
        (["some/model", "--tasks", PUZZLES, "--reward", "lgoic"], "did you mean 'logic'"),
        (["some/model", "--tasks", PUZZLES, "--reward", "none:f"], "there is no module 'none'"),
        (["some/model", "--tasks", PUZZLES, "--samples", "2", "--temperature", "0"], "identical"),
        (["some/model", "--tasks", PUZZLES, "--reward-options", "rihgt=1"], "'rihgt'"),
        (["some/model", "--tasks", PUZZLES, "--reward-options", "right"], "name=value"),
        (["no/such/model", "--tasks", PUZZLES], "no/such/model: no such file or folder"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(
    words, reason, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert reason in refused(capsys, *words)


@pytest.mark.parametrize("name", ["m/page.html", "m/summary.json", "m-and-other.html"])
def test_files_of_others_are_refused_before_a_model_is_loaded(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evals" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    assert "is not replaced" in refused(capsys, "some/m", "some/other", "--tasks", PUZZLES)
    assert path.read_text() == "mine"


def test_other_settings_do_not_go_on_with_the_same_folder(evaluated, two_models, capsys):
    evaluated(two_models[0], "--tasks", PUZZLES)
    again = [two_models[0], "--tasks", PUZZLES, "--max-tokens", "12", "--slots", "4"]
    assert "--resume" in refused(capsys, *again)
    assert "seed" in refused(capsys, *again, "--resume", "--seed", "1")


def test_a_model_whose_logits_are_no_numbers_fails_with_words(two_models, capsys, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(two_models[0], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = refused(capsys, str(folder), "--tasks", PUZZLES, "--out", str(tmp_path / "out"))
    assert "LlamaForCausalLM gives logits that are not finite" in said
    assert "its weights model.norm.weight hold NaN or infinite numbers" in said
