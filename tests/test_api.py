"""`sortedrl.train` and `sortedrl.evaluate`: what a notebook does, in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sortedrl
from sortedrl.config.data import RewardSettings
from sortedrl.config.train import Saving, TrainSettings
from sortedrl.errors import ConfigError, DataError, ModelError, RewardError

ROWS = [{"prompt": f"say {number}", "answer": number} for number in range(16)]
TINY = "tiny:hidden=32,layers=1,heads=2"
ONE_WORKER = TrainSettings(rewards=RewardSettings(workers=1), threads=1, saving=Saving(every=1))


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def letters(prompt, response):
    return sum(letter.isalpha() for letter in response) / (1 + len(response))


def train(rows=ROWS, reward=letters, **given):
    given = {"max_tokens": 12, "config": ONE_WORKER, **given}
    return sortedrl.train(given.pop("model", TINY), rows, reward, **given)


def kept_rows(run):
    text = (run.folder / "inputs" / "rows.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_the_public_names_are_there_and_importing_them_is_light():
    program = (
        "import sys, sortedrl\n"
        "assert set(sortedrl.__all__) <= set(dir(sortedrl))\n"
        "assert not {'torch', 'numpy', 'transformers', 'tyro', 'rich'} & set(sys.modules)\n"
        "sortedrl.Scheduler, sortedrl.Schedule\n"
        "assert 'torch' not in sys.modules\n"
        "for name in sortedrl.__all__: assert getattr(sortedrl, name) is not None\n"
        "from sortedrl.simulate.settings import PRESETS\n"
        "assert callable(sortedrl.simulate)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        sortedrl.trian  # noqa: B018


def test_rows_a_closure_and_nothing_else_make_a_run_that_goes_on():
    bonus, heard = 0.25, []
    run = train(reward=lambda prompt, response: bonus, callbacks=[heard.append])
    assert run.folder == Path("runs/train")
    assert [row["reward/mean"] for row in run.metrics] == [0.25, 0.25]
    assert heard == run.metrics
    assert run.settings.schedule.update_batch == 8, "sizes follow the 16 rows"
    assert run.ending.reason == "data"
    assert run.model.num_parameters() > 0
    assert run.tokenizer.decode([97]) == "a"
    assert run.report() == run.folder / "report.html"
    assert run.report().read_text().startswith("<!DOCTYPE html>"), "a second time"
    assert kept_rows(run) == ROWS
    assert run.resume(epochs=2) is run
    assert [row["update"] for row in run.metrics] == [1, 2, 3, 4]
    assert len(heard) == 4, "what was heard before is not heard again"
    assert repr(run) == "Run('runs/train', 4 updates, reward 0.250)"


def test_another_process_is_told_what_it_needs_to_resume():
    run = train(reward=lambda prompt, response: 1.0, epochs=1)
    with pytest.raises(ConfigError, match=r"Python object 'lambda'.*sortedrl\.Run\(FOLDER, reward"):
        sortedrl.Run(run.folder).resume(epochs=2)
    opened = sortedrl.Run(run.folder, reward=lambda prompt, response: 1.0)
    assert [row["update"] for row in opened.resume(epochs=2).metrics] == [1, 2, 3, 4]


def test_the_same_cell_a_second_time_makes_a_second_run_or_says_what_to_do():
    assert [train().folder.name for _ in range(2)] == ["train", "train-2"]
    train(out="mine")
    with pytest.raises(ConfigError, match=r"mine already holds a run; resume it \(sortedrl"):
        train(out="mine")


def test_several_rewards_of_every_kind_are_added_up():
    async def slow(prompt, response):
        return {"a": 0.5, "b": 0.25}

    def many(prompts, responses):
        return [2.0 for _ in responses]

    def columns(prompts, responses):
        return {name: [4.0 for _ in responses] for name in "ab"}

    run = train(reward=[lambda prompt, response: 1, slow, many, columns])
    first = run.metrics[0]
    assert first["reward/mean"] == 11.75
    assert (first["reward/lambda"], first["reward/slow"], first["reward/many"]) == (1, 0.75, 2)


def test_a_part_called_mean_does_not_replace_the_mean_of_the_reward():
    def parts(prompt, response):
        return {"mean": 1.0, "other": 2.0}

    first = train(reward=parts, max_tokens=2).metrics[0]
    assert (first["reward/mean"], first["reward/other"]) == (3.0, 2.0)


def test_a_function_called_reward_is_one_of_several_too():
    def reward(prompt, response):
        return 1.0

    first = train(reward=[reward, lambda prompt, response: 0.5, reward], max_tokens=2).metrics[0]
    assert first["reward/mean"] == 2.5
    assert (first["reward/reward_1"], first["reward/lambda"], first["reward/reward_3"]) == (
        1.0,
        0.5,
        1.0,
    )


def test_of_several_rewards_the_one_that_gives_none_is_named():
    with pytest.raises(RewardError, match=r"part 'lambda' must be a number .*, got None"):
        train(reward=[letters, lambda prompt, response: None], max_tokens=2)


def test_a_model_object_is_copied_and_trained_with_siblings():
    from sortedrl.models.tiny import TinySettings, tiny_model, tiny_tokenizer

    model = tiny_model(TinySettings(hidden=32, layers=1, heads=2))
    before = model.lm_head.weight.clone()
    run = train(model=model, tokenizer=tiny_tokenizer(), algorithm="grpo", learning_rate=1e-2)
    assert (model.lm_head.weight == before).all()
    assert (run.model.lm_head.weight != before).any()
    schedule = run.settings.schedule
    assert (schedule.samples_per_prompt, schedule.harvest_unit) == (8, "prompt")
    with pytest.raises(ConfigError, match="needs its tokenizer"):
        train(model=model)
    assert not Path("runs/train-2").exists(), "a refused run leaves nothing"


def test_a_callback_ends_the_run_and_resume_goes_on():
    run = train(callbacks=[lambda row: "stop"])
    assert run.ending.reason == "asked"
    assert repr(run).endswith("; stopped, resume() continues)")
    for wrong in (lambda row: "stop", None, [None]):
        with pytest.raises(ConfigError, match=r"callbacks must be a list of functions"):
            train(callbacks=wrong)
    assert not Path("runs/train-2").exists(), "refused before a run begins"
    with pytest.raises(ModelError, match=r"the run has not finished; continue it with run.resume"):
        run.model  # noqa: B018
    assert run.resume(callbacks=[]).ending.reason == "data"


def test_a_run_of_objects_resumes_where_its_folder_was_moved_to():
    train(rows=ROWS[:8], eval_rows=ROWS[8:], out="first")
    Path("first").rename("second")
    run = sortedrl.Run("second", reward=letters).resume(epochs=2)
    assert (run.settings.task, len([r for r in run.metrics if "loss" in r])) == (
        "second/inputs/rows.jsonl",
        2,
    )
    # From within, and from the settings of a checkpoint that still name the first folder.
    os.chdir("second")
    assert sortedrl.Run(".", reward=letters).resume(epochs=3).settings.model == TINY


def test_numbers_of_held_out_rows_have_the_same_names_in_every_run():
    names = [
        [name for name in train(rows=ROWS[:8], eval_rows=ROWS[8:]).metrics[-1] if "rows" in name]
        for _ in range(2)
    ]
    assert names == 2 * [["evaluation/eval_rows"]]


def test_evaluation_of_a_run_on_held_out_rows():
    held_out = [{"prompt": f"tell {number}", "answer": number} for number in range(4)]
    run = train(reward=lambda prompt, response: 0.25, eval_rows=held_out)
    scores = [row for row in run.metrics if "evaluation/score" in row]
    assert len(scores) == 2
    (mean,) = [value for key, value in scores[-1].items() if "evaluation/reward/" in key]
    assert (mean, scores[-1]["evaluation/score"]) == (0.25, 0.0)
    found = sortedrl.evaluate(run, held_out, lambda prompt, response: 1.0, samples=2, max_tokens=8)
    assert (found.score, len(found.answers)) == (1.0, 8)
    assert found.interval[1] == 1.0
    assert "<table>" in found._repr_html_()
    assert "reward" not in repr(found)
    found = sortedrl.evaluate(run, held_out, lambda prompt, response: -0.5, max_tokens=8)
    assert (found.score, found.reward) == (0.0, -0.5)
    assert repr(found).endswith(", reward=-0.500)")


def test_data_sets_and_other_iterables_are_rows():
    datasets = pytest.importorskip("datasets")
    run = train(rows=datasets.Dataset.from_list(ROWS))
    assert kept_rows(run) == ROWS
    run = train(rows=(row for row in ROWS[:8]), seed=3)
    assert run.settings.seed == 3
    run = train(rows=["one", "two", "three"], reward=lambda prompt, response: 0.0)
    assert run.metrics[0]["update"] == 1


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"rows": []}, ConfigError, "at least one row, got none"),
        ({"rows": 3}, ConfigError, "rows must be a list of dicts"),
        (
            {"rows": {"train": ROWS}},
            DataError,
            "give one split of a DatasetDict",
        ),
        ({"rows": iter(["a", "b"])}, DataError, "must be a dict such as"),
        (
            {"rows": [{"question": "why?"}]},
            DataError,
            r"^row 1: unknown column 'prompt'.*as prompt_field",
        ),
        ({"rows": [*ROWS, {"prompt": ""}]}, DataError, "^row 17: the prompt is empty"),
        ({"prompt_field": "question"}, DataError, "^row 1: unknown column 'question'"),
        ({"reward": 7}, ConfigError, r"a function of \(prompt, response\)"),
        ({"reward": []}, ConfigError, "at least one function"),
        ({"reward": "nowhere"}, ConfigError, "unknown reward 'nowhere'"),
        ({"reward": lambda response: 1.0}, ConfigError, r"must take \(prompt, response\)"),
        ({"reward": len}, ConfigError, r"must take \(prompt, response\)"),
        ({"reward": lambda response, prompt: 1.0}, ConfigError, "the prompt first .* swap them"),
        ({"model": 3}, ConfigError, "model must be a hub name"),
        ({"model": "./absent", "rows": "absent.jsonl"}, ModelError, "absent: no such file or fo"),
        ({"tokenizer": "gpt2"}, ConfigError, "with a model object only, and 'tiny"),
        ({"mode": "parital"}, ConfigError, "did you mean 'partial'"),
        ({"slots": "many"}, ConfigError, "engine.slots must be a whole number, got 'many'"),
        ({"samples": 1, "algorithm": "grpo"}, ConfigError, "must be at least 2, got 1"),
        ({"config": 3}, ConfigError, "config must be a TrainSettings, a dict such as"),
        ({"config": {"lora": {"rnk": 8}}}, ConfigError, "did you mean 'lora.rank'"),
        ({"config": "none.toml"}, DataError, "cannot be read"),
    ],
)
def test_what_a_user_gets_wrong_is_one_sentence_and_leaves_nothing_behind(given, error, words):
    with pytest.raises(error, match=words):
        train(**given)
    assert not Path("runs").exists()


def test_a_model_object_without_a_tokenizer_and_a_file_as_out_are_refused():
    from sortedrl.models.tiny import TinySettings, tiny_model

    model = tiny_model(TinySettings(hidden=32, layers=1, heads=2))
    with pytest.raises(ConfigError, match=r"but it has no name; pass tokenizer="):
        train(model=model)
    with pytest.raises(ConfigError, match=r"got 'gpt2'; give AutoTokenizer"):
        train(model=model, tokenizer="gpt2")
    Path("taken").write_text("")
    with pytest.raises(DataError, match="taken is a file"):
        train(out="taken")
    assert not Path("runs").exists()


def test_the_question_may_stand_in_another_column():
    rows = [{"question": f"say {number}", "answer": number} for number in range(8)]
    run = train(rows, prompt_field="question")
    assert (run.settings.data.prompt_field, kept_rows(run)) == ("question", rows)


def test_a_reward_that_raises_says_what_it_was_given():
    with pytest.raises(RewardError, match=r"KeyError: 'gold'[^$]*fields has: answer, place, pro"):
        train(reward=lambda prompt, response: prompt.fields["gold"])


def test_a_reward_that_cannot_be_sent_says_why():
    from threading import Lock

    lock = Lock()
    with pytest.raises(ConfigError, match="must not hold open files, locks"):
        train(reward=lambda prompt, response: float(lock.locked()))


def test_a_file_of_settings_is_taken_as_on_the_command_line():
    Path("c.toml").write_text(
        'threads = 1\nout = "here"\n[algorithm]\nname = "rloo"\n'
        "[schedule]\nsamples_per_prompt = 2\n[rewards]\nworkers = 1\n"
    )
    run = train(config="c.toml", epochs=1)
    assert run.folder == Path("here")
    assert run.settings.schedule.samples_per_prompt == 2
    assert run.settings.schedule.harvest_unit == "prompt"


def test_a_dict_of_settings_is_a_file_of_settings():
    run = train(
        config={
            "threads": 1,
            "rewards": {"workers": 1},
            "algorithm": {"name": "rloo"},
            "engine": {"slots": 4},
        },
        samples=2,
    )
    settings = run.settings
    assert (settings.engine.slots, settings.schedule.samples_per_prompt) == (4, 2)
    assert settings.schedule.harvest_unit == "prompt"
