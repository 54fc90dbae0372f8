"""Every field of every command and settings file meets nasty values.

A value is taken as it is, or refused in one sentence; nothing ends in a traceback, and nothing is
made. The fields are found in the dataclasses, so a new one is tried without a line here.
"""

import math
import re
import subprocess
import sys
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest

from sortedrl.cli import COMMANDS, main
from sortedrl.cli.arguments import parse, source_and_flags
from sortedrl.config.data import EvaluationSettings
from sortedrl.config.parsing import options_from, settings_over, toml_text
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.config.train import SupervisedSettings, TrainSettings
from sortedrl.errors import ConfigError, DataError
from sortedrl.simulate.settings import Simulation, simulation_from

DOTTED = ("train", "sft")
NUMBERS = (0, -1, 1, 2**31, 2**63, 10**18, 10**400, 0.5, -0.0, 1e308, -1e308, math.nan, math.inf)
TEXTS = ("", " ", "\0", "a\0b", "\udcff", "None", "nan", "true", "[]", "-1", "../x", "x" * 5000)
ODD = (True, False, [], [[]], ["a"], [0], {}, {"a": 1})


def fields_of(kind, *path):
    """Every field within sections within a dataclass: its path and its type."""
    for name, hint in get_type_hints(kind).items():
        if is_dataclass(hint):
            yield from fields_of(hint, *path, name)
        else:
            yield (*path, name), hint


def one_sentence(error, *, start=""):
    text = str(error)
    assert text.strip()
    assert text.startswith(start)
    assert "\n" not in text


def values_of(settings, path):
    for name in path:
        settings = getattr(settings, name)
    return settings


def is_sound(value):
    """Whether a value that was taken can be used: finite, sayable, not a byte too large."""
    if isinstance(value, tuple):
        return all(map(is_sound, value))
    if isinstance(value, str | Path):
        return "\0" not in str(value) and str(value).isprintable()
    return not isinstance(value, float) or not math.isnan(value)


@pytest.mark.parametrize("default", [TrainSettings(), SupervisedSettings(), Simulation()])
def test_a_file_with_a_nasty_value_is_read_or_refused_in_one_sentence(default):
    for path, _ in fields_of(type(default)):
        for value in (*NUMBERS, *TEXTS, *ODD):
            table = value
            for name in reversed(path):
                table = {name: table}
            try:
                settings = settings_over(default, table, path=Path("mine.toml"))
            except DataError as error:
                one_sentence(error, start="mine.toml: ")
                continue
            assert is_sound(values_of(settings, path)), (path, value)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_flag_with_a_nasty_value_is_taken_or_refused_in_one_sentence(name):
    kind = import_module(f"sortedrl.cli.{name}").Arguments
    positional = {"plot": ["slots", "x"], "data": ["show"], "cluster": ["check"]}.get(name, [])
    positional = positional or {"fit": ["x"], "trace": ["x"], "eval": ["x"]}.get(name, [])
    needed = ["--out", "x.svg"] if name == "plot" else []
    for path, _ in fields_of(kind):
        shown = [part for part in path if part != "settings"]
        flag = "--" + (".".join(shown) if name in DOTTED else shown[-1]).replace("_", "-")
        for value in (*map(str, NUMBERS), *TEXTS):
            words = [*positional, *(needed if flag != "--out" else []), f"{flag}={value}"]
            try:
                given = parse(kind, words, prog="x", description="", is_dotted=name in DOTTED)
            except ConfigError as error:
                one_sentence(error)
                continue
            assert is_sound(values_of(given, path)), (flag, value)


@pytest.mark.parametrize("default", [TrainSettings(), SupervisedSettings(), Simulation()])
def test_no_number_is_taken_that_is_not_finite_or_takes_the_machine_down(default):
    for path, hint in fields_of(type(default)):
        for value in (math.nan, math.inf, -math.inf, 1e308, 10**18, 10**12):
            table = value
            for name in reversed(path):
                table = {name: table}
            if path[-1] in ("seed", "learning_rate"):
                continue
            if path[-1] == "tolerance" and value == math.inf:
                continue
            with pytest.raises(DataError):
                settings_over(default, table, path=Path("mine.toml"))
        if hint is float:
            assert math.isfinite(values_of(default, path))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--device", "meta"], "device must be cpu, cuda"),
        (["train", "--threads", "1000000"], "threads must be at most 1,024"),
        (["train", "--engine.slots", "1000000000"], "engine.slots must be at most 65,536"),
        (["simulate", "paper", "--slots", "1000000000"], "engine.slots must be at most 65,536"),
        (["simulate", "paper", "--groups", "1000000"], "10,000,000 answers at most"),
        (["tune", "paper", "--workers", "100000"], "workers must be at most 256"),
        (["train", "--out="], "--out must be a path, got ''"),
        (["train", ""], "must not be empty"),
        (["train", "--out", "a\0b"], "must not hold a NUL character"),
        (["report", "a\0b"], "must not hold a NUL character"),
        (["report", "\udcff"], "must be valid UTF-8"),
        (["train", "--evaluation.target", "nan"], "evaluation.target must be a finite number"),
        (["train", "--lora.targets", "q_proj"], "need lora.rank"),
        (["train", "--lora.alpha", "8"], "need lora.rank"),
        (["train", "--reward-options", "right=nan"], "right must be a finite number, got 'nan'"),
        (["train", "--reward-options", "right=1e999"], "right must be a finite number"),
        (["train", "--reward-options", "a=1", "a=2"], "option a is given twice"),
        (["train", "--reward-options", "a=1", "--reward-options", "b=2"], "is given twice"),
        (["simulate", "six", "--seed", "1", "--seed", "1"], "--seed is given twice"),
        (["simulate", "six", "--json", "--json"], "--json is given twice"),
        (["train", "--cluster.overlap", "--cluster.no-overlap"], "is given twice"),
        (["train", "--model", "tiny:foo=1"], "model 'tiny:foo=1': unknown option 'foo'"),
        (["train", "--model", "tiny:layers=2,layers=3"], "option layers is given twice"),
        (["train", "--model", "tiny:hidden=8192,layers=99"], "load a model that is not tiny"),
        (["train", "--task", "knights_knaves:count=1000000000"], "count must be at most"),
        (["train", "--task", "gsm8k:split=a,split=b"], "option split is given twice"),
        (["train", "--schedule.strategy", "SORTED"], "did you mean 'sorted'"),
        (["train", "--precision", "BFloat16"], "did you mean 'bfloat16'"),
        (["train", "--passes.compiled", "yes"], "must be True or False, got 'yes'"),
        (["simulate", "six", "--replay=false"], "takes no value"),
        (["simulate", "paper", "six"], "give one preset, file or run"),
        (["fit", "a", "b"], "unexpected 'b'"),
        (["fit"], "EVENTS is missing"),
        (["plot", "slots", "x"], "--out is missing"),
        (["plot", "Slots", "x", "--out", "x.svg"], "did you mean 'slots'"),
        (["--json", "presets"], "the command must come before its options"),
        (["cluster", "chekc"], "did you mean 'check'"),
        (["engines", "--seconds", "inf"], "seconds must be a finite number"),
        (["watch", "x", "--port", "70000"], "port must be at most 65,535"),
        (["eval", "x", "--tasks", "gsm8k", "--device", "meta"], "device must be"),
        (["eval", "x", "--tasks", "gsm8k", "--top-p", "nan"], "top_p must lie in"),
        (["eval", "x", "--tasks", "gsm8k", "--temperature", "-1"], "temperature must be 0"),
        (["sft", "--device", "tpu"], "device must be"),
        (["simulate", "--plot", "absent/x.svg", "paper"], "there is no folder absent"),
        (["compare", "--plot", ".", "paper"], "Is a directory"),
        (["train", "--out", "file"], "must be a folder, but file is a file"),
        (["train", "--out", "file/run"], "must be a folder"),
        (["demo", "--out", "file"], "must be a folder"),
        (["sft", "--out", "file"], "must be a folder"),
        (["train", "folder.toml"], "Is a directory"),
        (["fit", "folder.toml"], "Is a directory"),
    ],
)
def test_a_mistake_ends_in_one_sentence_with_code_2_and_nothing_made(
    words, said, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.toml").mkdir()
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    # A task is opened after the line that says what is trained on.
    sentence = re.sub(r"\Aruns/train: .* on .*\n", "", err)
    assert sentence.startswith("sortedrl: ")
    assert sentence.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.toml"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('model = ["a"]\n', "model must be text in quotes, got ['a']"),
        ("model = 3\n", "model must be text in quotes, got 3"),
        ("model = 2020-01-01\n", "model must be text in quotes"),
        ('seed = "3"\n', "seed must be a whole number, got '3'"),
        ("seed = true\n", "seed must be a whole number, got True"),
        ("seed = 1.0\n", "seed must be a whole number, got 1.0"),
        ('[evaluation]\ntasks = "gsm8k"\n', "evaluation.tasks must be a list, got 'gsm8k'"),
        ('[evaluation]\ntasks = [["gsm8k"]]\n', "evaluation.tasks must be text in quotes"),
        ('[cluster]\noverlap = "yes"\n', "cluster.overlap must be true or false, got 'yes'"),
        ("[cluster]\noverlap = 1\n", "cluster.overlap must be true or false, got 1"),
        ('[schedule]\nmode = "Partial"\n', "did you mean 'partial'"),
        ('[schedule]\nmode = ["partial"]\n', "unknown schedule.mode"),
        ("[[schedule]]\n", "[schedule] must be a section"),
        ("[bogus]\n", "unknown key 'bogus'"),
        ("seed = 1\nseed = 2\n", "not TOML"),
        ('out = ""\n', "out must be a path, got ''"),
        ('out = "a\\u0000b"\n', "out must not hold a NUL character"),
        ('device = "meta"\n', "device must be cpu, cuda"),
        ("[engine]\nslots = 1000000000\n", "engine.slots must be at most"),
        ("[optimiser]\nlearning_rate = 1" + 400 * "0" + "\n", "is too large a number"),
    ],
)
def test_a_file_with_a_mistake_ends_in_one_sentence_that_names_it(
    content, said, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(content)
    assert main(["train", "mine.toml"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.startswith("sortedrl: mine.toml: ")
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


@pytest.mark.parametrize(
    "settings",
    [
        lambda: TrainSettings(device="meta"),
        lambda: TrainSettings(threads=10**6),
        lambda: TrainSettings(engine=EngineSettings(slots=10**9)),
        lambda: TrainSettings(out=Path("a\0b")),
        lambda: EvaluationSettings(top_p=math.nan),
        lambda: EvaluationSettings(slots=10**9),
        lambda: Schedule(group_prompts=1000, samples_per_prompt=10**5),
        lambda: Schedule(over_launch=math.nan),
        lambda: SupervisedSettings(model=" "),
    ],
)
def test_python_is_refused_what_a_command_line_is(settings):
    with pytest.raises(ConfigError):
        settings()


def test_flags_and_words_mean_the_same_in_any_order(capsys, tmp_path):
    assert main(["simulate", "six", "--slots", "3", "--json"]) == 0
    first = capsys.readouterr().out
    for words in (
        ["simulate", "--slots", "3", "six", "--json"],
        ["simulate", "--json", "--slots=3", "six"],
    ):
        assert main(words) == 0
        assert capsys.readouterr().out == first
    events, picture = tmp_path / "events.jsonl", tmp_path / "slots.svg"
    assert main(["simulate", "--events", str(events), "six"]) == 0
    for words in (
        ["--scheme", "dark", "slots", str(events), "--out", str(picture)],
        ["slots", "--scheme=dark", "--out", str(picture), str(events)],
        ["--out", str(picture), "--groups", "1", "--scheme", "dark", "slots", str(events)],
    ):
        picture.unlink(missing_ok=True)
        assert main(["plot", *words]) == 0
        assert picture.exists()


def test_a_source_may_stand_anywhere_and_a_flag_beats_it(tmp_path):
    kind = import_module("sortedrl.cli.train").Arguments
    words = ["--schedule.mode", "coupled", "mine.toml", "--resume"]
    assert source_and_flags(kind, words, is_dotted=True) == (
        "mine.toml",
        ["--schedule.mode", "coupled", "--resume"],
    )
    path = tmp_path / "mine.toml"
    path.write_text(toml_text({"preset": "six", "engine": {"slots": 2}}))
    assert simulation_from(str(path)).engine.slots == 2


def test_every_setting_of_a_file_can_be_a_flag_too():
    kind = import_module("sortedrl.cli.train").Arguments
    words = ["--schedule.mode", "coupled", "--cluster.no-overlap", "--evaluation.tasks", "a", "b"]
    words += ["--schedule.tolerance", "inf", "--max-updates", "None", "--passes.compiled", "True"]
    given = parse(kind, words, prog="x", description="", default=kind(), is_dotted=True)
    table = {
        "schedule": {"mode": "coupled", "tolerance": math.inf},
        "cluster": {"overlap": False},
        "evaluation": {"tasks": ["a", "b"]},
        "max_updates": "None",
        "passes": {"compiled": True},
    }
    assert given.settings == settings_over(TrainSettings(), table, path=Path("x"))


def test_options_of_a_reward_are_json_or_text_and_finite():
    assert options_from(["a=1", "b=[1, 2]", "c=text", "d = 3 "]) == {
        "a": 1,
        "b": [1, 2],
        "c": "text",
        "d": 3,
    }
    for word in ("a=NaN", "a=-Infinity", "a=nan", "a=INF", "a=[1, NaN]", 'a={"b": 1e999}'):
        with pytest.raises(ConfigError, match="must be a finite number"):
            options_from([word])
    assert options_from(["a=" + "[" * 9000]) == {"a": "[" * 9000}


_WITHOUT = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
from importlib import util
whole = util.find_spec
util.find_spec = lambda name, *more: None if name in {blocked} else whole(name, *more)
from sortedrl.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--model", "tiny"],
        ["demo"],
        ["sft"],
        ["eval", "tiny", "--tasks", "knights_knaves:count=2"],
        ["data", "stats", "knights_knaves:count=2", "--tokenizer", "tiny"],
        ["train", "--dry-run"],
    ],
)
def test_a_command_names_the_extra_it_lacks_before_anything_is_made(words, tmp_path):
    program = _WITHOUT.format(blocked={"torch", "transformers", "safetensors", "tokenizers"})
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "sortedrl[native]" in last
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
