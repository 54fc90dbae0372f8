import json
import subprocess
import sys
import tomllib

import pytest

from sortedrl.cli import COMMANDS, eval, main, train
from sortedrl.cli.arguments import parse
from sortedrl.core.events import read_events
from sortedrl.core.meter import measure
from sortedrl.report.watch import followed
from sortedrl.simulate.settings import PRESETS, simulation_from, simulation_to_toml


def sortedrl(*words):
    """The command in a process of its own, as a person runs it."""
    return subprocess.run(
        [sys.executable, "-m", "sortedrl", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def refused(capsys):
    """Runs a command that must be refused with code 2, and gives what it said."""

    def run(*words):
        try:
            code = main(words)
        except SystemExit as error:
            code = error.code
        out, err = capsys.readouterr()
        assert code == 2
        assert out == ""
        return " ".join(err.replace("│", " ").split())

    return run


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_teaches_by_example_without_torch_or_numpy(words):
    program = (
        "import sys; from sortedrl.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"sortedrl {words[0] if len(words) > 1 else 'compare'}" in done.stdout


def test_a_simulation_runs_without_torch_or_numpy():
    program = (
        "import sys; from sortedrl.cli import main\n"
        "assert main(['simulate', 'six']) == 0\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=300, check=True)


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("sortedrl ")


def test_compare_prints_one_json_object_with_the_promised_columns(capsys):
    assert main(["compare", "six", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    promised = (
        "strategy mode lookahead bubble steady_bubble goodput goodput_vs_sync throughput "
        "length_bias decoded_tokens trained_tokens discarded_tokens mean_staleness max_staleness"
    )
    for row in rows:
        assert set(promised.split()) <= set(row)
    assert rows[0]["strategy"] == "sync"
    assert rows[0]["goodput_vs_sync"] == 1.0


def test_compare_includes_the_schedule_that_was_asked_for(capsys):
    words = "compare six --strategies sorted --lookaheads 0 --lookahead 1 --mode coupled --json"
    assert main(words.split()) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert ("sorted", "coupled", 1) in [(r["strategy"], r["mode"], r["lookahead"]) for r in rows]


def test_simulate_says_the_same_in_json_in_events_and_in_words(capsys, tmp_path):
    path = tmp_path / "events.jsonl"
    assert main(["simulate", "picture", "--json", "--events", str(path)]) == 0
    said = json.loads(capsys.readouterr().out)
    figures = measure(read_events(path)).run
    assert said["bubble"] == figures.bubble
    assert said["trained_tokens"] == figures.ledger.trained
    assert len(said["per_group"]) == 4
    assert sum(row["trajectories"] for row in said["per_round"]) == 128
    assert main(["simulate", "picture"]) == 0
    words = capsys.readouterr().out
    assert f"bubble     {100 * figures.bubble:.1f} %" in words


def test_tune_prints_a_toml_file_that_the_other_commands_take(capsys, tmp_path):
    words = "tune picture --workers 1 --modes partial --lookaheads 0 1 --group-sizes 32 64"
    assert main(words.split()) == 0
    text = capsys.readouterr().out
    assert "# gain:" in text
    assert tomllib.loads(text)["schedule"]["group_prompts"] in (32, 64)
    path = tmp_path / "best.toml"
    path.write_text(text)
    assert main(["simulate", str(path)]) == 0


def test_tune_keeps_to_its_constraints(capsys):
    words = "tune picture --workers 1 --on-policy-only --max-length-bias 0.02 --json"
    assert main(words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["max_staleness"] == 0
    assert abs(found["best"]["length_bias"] - 1) <= 0.02
    assert {row["mode"] for row in found["tried"]} == {"on_policy", "coupled"}


def test_tune_says_that_the_present_settings_break_the_constraints(capsys):
    words = "tune picture --workers 1 --modes on_policy --lookaheads 0 --update-batches 8"
    assert main(words.split()) == 0
    yours, gain = capsys.readouterr().out.splitlines()[2:4]
    assert yours.endswith("; does not meet the constraints")  # the preset's mode is partial
    assert gain.startswith("# gain:  0.")
    assert "within the error" not in gain


def test_tune_says_when_nothing_meets_the_constraints(refused):
    words = "tune picture --workers 1 --modes on_policy --lookaheads 0 --max-length-bias 0.001"
    assert "meets the constraints" in refused(*words.split())


def test_fit_prints_settings_that_predict_the_run(capsys, tmp_path):
    events, fitted = tmp_path / "events.jsonl", tmp_path / "fitted.toml"
    assert main(["simulate", "paper", "--groups", "1", "--events", str(events)]) == 0
    capsys.readouterr()
    assert main(["fit", str(events)]) == 0
    fitted.write_text(capsys.readouterr().out)
    costs = simulation_from(str(fitted)).costs.costs()
    true = PRESETS["paper"]().costs.costs()
    assert costs.step_seconds == pytest.approx(true.step_seconds, rel=1e-4)
    assert main(["simulate", str(fitted), "--groups", "1"]) == 0


@pytest.mark.parametrize("name", PRESETS)
def test_settings_survive_the_way_through_a_toml_file(name, tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text(simulation_to_toml(PRESETS[name]()))
    assert simulation_from(str(path)) == PRESETS[name]()


@pytest.mark.parametrize(
    "words",
    [
        "--strategies sorted --modes partial {}",
        "--modes partial --strategies sorted {} --lookaheads 0",
        "--strategies sorted --modes partial --lookaheads 0 {}",
    ],
)
def test_what_is_compared_may_stand_behind_flags_with_several_values(words, capsys, tmp_path):
    log = tmp_path / "lengths.jsonl"
    log.write_text("".join(f'{{"tokens": {n + 1}, "step": {n // 4}}}\n' for n in range(16)))
    for source in ("six", str(log)):
        assert main(["compare", *words.format(source).split()]) == 0
        assert "sorted/partial" in capsys.readouterr().out
    assert main(["compare", "--strategies", "sorted", "six", "picture"]) == 2
    assert "give one preset, file or run, got 'six', 'picture'" in capsys.readouterr().err


def test_a_flag_beats_the_file_and_the_file_beats_the_preset(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('preset = "six"\n[schedule]\nmode = "coupled"\nupdate_batch = 2\n')
    assert main(["simulate", str(path), "--update-batch", "6", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["mode"], row["updates"], row["trajectories"]) == ("coupled", 1, 6)


def test_a_file_can_switch_off_what_its_preset_switches_on(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('preset = "six"\n[lengths]\nreplay = false\n')
    assert PRESETS["six"]().lengths.replay
    assert not simulation_from(str(path)).lengths.replay


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["simulat"], "did you mean 'simulate'"),
        (["simulate", "papr"], "did you mean 'paper'"),
        (["simulate", "paper", "--strategy", "sorte"], "did you mean 'sorted'"),
        (["simulate", "paper", "--mode=partail"], "did you mean 'partial'"),
        (["simulate", "paper", "--hardware", "h100x8-lama-3.1-8b"], "h100x8-llama-3.1-8b"),
        (["simulate", "paper", "--update-bach", "3"], "--update-batch"),
        (["simulate", "paper", "--update-batch", "1024"], "must lie in 1..512"),
        (["simulate", "paper", "--slots", "0"], "engine.slots must be at least 1, got 0"),
        (["simulate", "paper", "--median", "-3"], "lengths.median must be above 0, got -3"),
        (["simulate", "paper", "--values", "4", "-1"], "at least 1 token each, got -1"),
        (["simulate", "paper", "--tolerance", "0.1"], "needs mode 'coupled'"),
        (["simulate", "paper", "--groups", "0"], "groups must be at least 1, got 0"),
        (["simulate", "paper", "--length-file", "absent.csv"], "absent.csv: cannot be read"),
        (["simulate", "absent.toml"], "absent.toml: cannot be read"),
        (["simulate", "six", "--plot", "absent/x.svg"], "absent/x.svg: cannot be written"),
        (["simulate", "six", "--events", "absent/x.jsonl"], "absent/x.jsonl: cannot be written"),
        (["compare", "six", "--modes", "coupld"], "did you mean 'coupled'"),
        (["train", "--lr", "1e-6"], "did you mean --optimiser.learning-rate"),
        (["train", "--num-generations", "8"], "did you mean --schedule.samples-per-prompt"),
        (["train", "--max-steps", "8"], "did you mean --max-updates"),
        (["train", "--foo", "8"], "unknown option --foo; --help lists them all"),
        (["fit", "absent.jsonl"], "absent.jsonl: cannot be read"),
    ],
)
def test_bad_input_is_refused_with_what_was_given_and_what_to_do(words, said, refused):
    assert said in refused(*words)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[schedule]\nupdate_bach = 3\n", "did you mean 'schedule.update_batch'"),
        ("[shedule]\nupdate_batch = 3\n", "did you mean 'schedule'"),
        ("schedule = 3\n", "[schedule] must be a section, got 3"),
        ('preset = "papr"\n', "did you mean 'paper'"),
        ('[schedule]\nstrategy = "sorte"\n', "did you mean 'sorted'"),
        ('[schedule]\nupdate_batch = "many"\n', "'many'"),
        ("[schedule]\nupdate_batch = 4096\n", "must lie in 1..512"),
        ("[schedule\n", "not TOML"),
    ],
)
def test_a_bad_settings_file_is_refused_by_name(content, said, refused, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(content)
    message = refused("simulate", str(path))
    assert said in message
    assert "mine.toml" in message


def test_a_refused_run_leaves_no_file(refused, tmp_path):
    events = tmp_path / "events.jsonl"
    refused("simulate", "paper", "--slots", "0", "--events", str(events))
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_is_not_an_error():
    done = subprocess.run(
        f"{sys.executable} -m sortedrl presets | head -1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stderr == ""


def test_the_exit_code_reaches_the_shell():
    assert sortedrl("simulate", "six").returncode == 0
    assert sortedrl("simulate", "six", "--slots", "0").returncode == 2


def test_compare_agents_tells_slots_of_turns_from_lock_step(capsys, tmp_path):
    small = ["--prompts", "64", "--group-prompts", "32", "--update-batch", "16", "--slots", "16"]
    assert main(["compare", "agents", *small, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["lock step"]["goodput_vs_lock_step"] == 1.0
    turns = rows["slot per turn, sorted/partial"]
    assert turns["goodput_vs_lock_step"] > 1
    assert turns["outside_bubble"] < rows["slot per trajectory, sorted/partial"]["outside_bubble"]
    assert main(["compare", "agents", *small, "--plot", str(tmp_path / "agents.svg")]) == 0
    assert "vs lock step" in capsys.readouterr().out
    picture = (tmp_path / "agents.svg").read_text()
    titles = ("lock step", "slot per trajectory, sorted/partial", "slot per turn, sorted/partial")
    places = [picture.index(f">{title}") for title in titles]
    assert places == sorted(places)


def test_report_trace_and_watch_read_a_log_of_conversations(tmp_path):
    log = tmp_path / "agents.jsonl"
    small = ["--prompts", "32", "--group-prompts", "16", "--update-batch", "8", "--slots", "8"]
    assert main(["simulate", "agents", *small, "--events", str(log)]) == 0
    assert log.read_text().count('"event":"pause"') > 0
    assert main(["report", str(log), "--out", str(tmp_path / "page.html")]) == 0
    assert main(["trace", str(log), "--out", str(tmp_path / "trace.json")]) == 0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (run,) = followed([log])
    run.look()
    assert run.is_ended
    assert {event.kind for event in run.record.events} >= {"pause", "reply"}


# --- flags alike in every command ---------------------------------------------------------------


def test_train_without_words_and_with_help_shows_the_flags_that_people_use(capsys):
    assert main(["train"]) == 0
    short = capsys.readouterr().out
    assert main(["train", "--help"]) == 0
    assert capsys.readouterr().out == short
    flags = [line.strip() for line in short.splitlines() if line.startswith("  --")]
    assert 12 <= len(flags) <= 20
    assert flags == list(train.COMMON)
    with pytest.raises(SystemExit):
        main(["train", "--help-all"])
    everything = capsys.readouterr().out
    assert "--optimiser.learning-rate" in everything
    assert everything.count("--") > 5 * len(flags)


@pytest.mark.parametrize(
    ("command", "dotted", "words"),
    [
        (train.Arguments, True, ["--prompt-field", "question"]),
        (train.Arguments, True, ["--data.prompt-field", "question"]),
        (eval.Arguments, False, ["m", "--prompt-field", "question"]),
        (eval.Arguments, False, ["m", "--data.prompt-field", "question"]),
    ],
)
def test_a_flag_is_known_with_and_without_its_section(command, dotted, words):
    given = parse(command, words, prog="p", description="", is_dotted=dotted)
    data = given.settings.data if dotted else given.data
    assert data.prompt_field == "question"


@pytest.mark.parametrize(
    "flag", ["--time-limit-seconds", "--limit", "--system", "--failure-reward", "--max-tokens"]
)
def test_the_flags_of_an_evaluation_are_those_of_a_training_run(flag):
    parse(train.Arguments, [flag, "1"], prog="p", description="", is_dotted=True)
    parse(eval.Arguments, ["m", flag, "1"], prog="p", description="")


def test_a_flag_that_two_sections_have_must_name_one(refused):
    said = refused("train", "--kind", "none")
    assert "--kind is ambiguous; give --correction.kind or --cluster" in said


def test_a_simulation_takes_flags_with_their_sections(capsys):
    assert main(["simulate", "six", "--schedule.mode", "coupled", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mode"] == "coupled"


def test_the_file_of_settings_may_follow_a_flag_that_takes_many_values(tmp_path):
    config = tmp_path / "c.toml"
    config.write_text('model = "tiny:layers=1"\n[evaluation]\nevery = 7\n')
    given, chosen = train._given(["--evaluation.tasks", "a", "b", str(config), "--seed", "3"])
    assert (given.settings.model, given.settings.seed) == ("tiny:layers=1", 3)
    assert given.settings.evaluation.tasks == ("a", "b")
    assert chosen == {"model", "evaluation.every", "evaluation.tasks", "seed"}


def test_a_run_says_something_before_anything_heavy_is_loaded():
    program = (
        "import sys\n"
        "from sortedrl.cli import train\n"
        "from sortedrl.runs import start\n"
        "def loading(*_, **__):\n"
        "    assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
        "    raise SystemExit(7)\n"
        "start._train = loading\n"
        "task = 'knights_knaves:people=2,count=8'\n"
        "train.run(['--model', 'tiny', '--out', 'here', '--task', task])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 7, done.stderr
    assert done.stderr.startswith("here: tiny on knights_knaves")


@pytest.mark.parametrize("command", ["eval", "report", "trace", "demo", "data"])
def test_help_calls_no_option_with_a_default_required(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    options = capsys.readouterr().out.split("--help", 1)[1]
    assert options
    assert "(required)" not in options
