"""README and docs tell the truth: their commands are run and their outputs compared."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.page import page as results_page
from experiments.record import Results
from experiments.summary import summary
from forked import run_command, run_program
from sortedrl.config.parsing import read_toml

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ELSEWHERE = ("make demo", "make test", "make bench", "git clone", "cd ")
"""Commands that cannot run inside a test: they run this test, take minutes, or need a network."""


def blocks(language):
    for page in PAGES:
        for found, body in BLOCK.findall(page.read_text()):
            if found == language:
                yield page.relative_to(ROOT).as_posix(), body


def sessions():
    """Every `console` block: its commands, a `$` before each, with the output shown."""
    for page, body in blocks("console"):
        parts = [part.partition("\n") for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]]
        shown = [(command, output.rstrip("\n")) for command, _, output in parts]
        yield pytest.param(shown, id=f"{page}: {shown[0][0]}")


def run(command, folder):
    """A command as a shell runs it; one of ours without a shell's signs starts faster."""
    words = shlex.split(command)
    if words[0] == "sortedrl" and not set(command) & set("|>&;$*"):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("COLUMNS", "LINES"):
                patch.delenv(name, raising=False)
            return run_command(*words[1:], folder=folder)
    ours = ("MAKE", "MFLAGS", "COLUMNS", "LINES")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def compare_pictures(folder):
    """What was drawn into the folder's docs/img is what the project shows; gives the names."""
    drawn = {path.name: path for path in (folder / "docs" / "img").iterdir()}
    for name, path in drawn.items():
        kept = ROOT / "docs" / "img" / name
        if kept.exists():
            assert path.read_text() == kept.read_text(), f"{name} is not what its command draws"
    return set(drawn)


DRAWINGS = [
    found
    for page in PAGES
    for found in re.findall(r"`(sortedrl [^`]*) --plot docs/img/(\S+)`", page.read_text())
]
"""Commands in the text that draw a picture of ours, without the flag for it, and the pictures."""


@pytest.mark.parametrize("shown", list(sessions()))
def test_shown_commands_print_what_is_shown(shown, tmp_path):
    (tmp_path / "docs" / "img").mkdir(parents=True)
    pictures = set()
    for command, output in shown:
        if command.startswith(ELSEWHERE):
            continue
        for plain, name in DRAWINGS:
            if plain == command:  # it prints the same, so that one process will do
                command = f"{plain} --plot docs/img/{name}"
                pictures.add(name)
        done = run(command, ROOT if command.startswith("make") else tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.rstrip("\n") == output
    assert pictures <= compare_pictures(tmp_path)


def drawings():
    """The drawing commands that are shown nowhere without their picture."""
    shown = {command for page in sessions() for command, _ in page.values[0]}
    for plain, name in DRAWINGS:
        if plain not in shown:
            yield pytest.param(f"{plain} --plot docs/img/{name}", name, id=name)


@pytest.mark.parametrize(("command", "name"), list(drawings()))
def test_a_picture_is_what_its_command_draws(command, name, tmp_path):
    (tmp_path / "docs" / "img").mkdir(parents=True)
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert name in compare_pictures(tmp_path)


@pytest.mark.parametrize("body", [pytest.param(body, id=page) for page, body in blocks("python")])
def test_a_shown_program_runs(body, tmp_path):
    done = run_program(body, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_first_run_of_the_quickstart_is_trained_further_when_it_is_resumed(tmp_path):
    shell = [body for page, body in blocks("sh") if page == "docs/start/quickstart.md"]
    (body,) = [body for body in shell if "runs/first" in body]
    updates = []
    for command in body.replace("\\\n", "").splitlines():
        done = run(command, tmp_path)
        assert done.returncode == 0, done.stderr
        updates.append(len((tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()))
    assert updates[0] == updates[1] < updates[2]


def test_the_times_of_the_tutorial_are_those_of_its_plan():
    page = (ROOT / "docs/tutorials/gsm8k.md").read_text()
    (command,) = re.findall(r"^sortedrl train .*--dry-run.*$", page, flags=re.MULTILINE)
    done = run(command, ROOT)
    assert done.returncode == 0, done.stderr
    planned = re.search(r"predicted  (\d+) minutes \(sync: (\d+) minutes\)", done.stdout)
    shown = re.search(r"about (\d+) minutes on an H100, and (\d+) with the synchronous", page)
    assert planned is not None
    assert shown is not None
    assert planned.groups() == shown.groups()


def test_every_picture_is_shown_and_every_shown_picture_exists():
    shown = set()
    for page in PAGES:
        for target in re.findall(r'(?:!\[[^]]*\]\(|<img [^>]*src=")([^)"]+)', page.read_text()):
            path = (page.parent / target).resolve()
            assert path.exists(), f"{page.name} shows {target}"
            shown.add(path.name)
    drawn = {path.name for path in (ROOT / "docs" / "img").iterdir()}
    assert drawn == shown


def test_every_link_inside_the_project_leads_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"(?<!!)\[[^]]*\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_path_and_test_named_in_the_paper_to_code_table_exists():
    text = (ROOT / "docs" / "explanation" / "from-paper-to-code.md").read_text()
    named = set(
        re.findall(r"`((?:src|tests|docs|benchmarks|experiments)/[\w/.-]+?)(?:::(\w+))?`", text)
    )
    assert len(named) > 10
    for path, function in named:
        assert (ROOT / path).exists(), path
        assert not function or f"def {function}(" in (ROOT / path).read_text(), function


def test_every_make_verb_in_the_readme_exists():
    makefile = (ROOT / "Makefile").read_text()
    for verb in re.findall(r"make ([a-z]+)", (ROOT / "README.md").read_text()):
        assert f"\n{verb}:" in makefile


def test_the_pages_of_results_are_what_the_results_say():
    results = Results(ROOT / "experiments" / "results")
    for name, text in (("results", summary(results)), ("result-tables", results_page(results))):
        shown = (ROOT / "docs" / f"{name}.md").read_text()
        assert text == shown, "run: python -m experiments page"


def rows_of(text, heading):
    """The rows of the first table whose heading begins so, as lists of cells."""
    _, _, after = text.partition(f"\n| {heading}")
    lines = after.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_of_the_readme_is_that_of_the_results():
    """The numbers of the README are rounded from the two first tables of the results."""
    results = (ROOT / "docs" / "results.md").read_text()
    speed = {(model, name): cells for model, name, *cells in rows_of(results, "model | schedule")}
    learning = {name: cells for name, *cells in rows_of(results, "schedule | seeds")}
    shown = rows_of((ROOT / "README.md").read_text(), "schedule | slots idle")
    sources = [
        ("sync", "sync"),
        ("sorted/coupled", "sorted/coupled +1"),
        ("sorted/partial +1", "sorted/partial +1"),
    ]
    assert len(shown) == len(sources)
    for (_, idle, times, to_score), (name, learned) in zip(shown, sources, strict=True):
        idle_percent, _, ratio, *_ = speed["SmolLM2-135M", name]
        assert idle == f"{round(float(idle_percent))} %"
        assert times == f"{float(ratio):.2g} x"
        assert to_score == f"{float(learning[learned][4]):g} x"
    large = {name: cells for name, *cells in rows_of(results, "schedule | slots idle, %")}
    assert (
        f"8B shape, trained in full on that card: {float(large['sorted/partial +1'][2]):.1f} x"
        in (ROOT / "README.md").read_text()
    )


def test_every_table_of_the_experiments_is_toml():
    for path in (ROOT / "experiments").rglob("*.toml"):
        assert read_toml(path), path
