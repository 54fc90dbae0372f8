"""Every command, settings file and link on the pages is right: parsed by the program's own parser.

What can be run in a test is run by `test_docs.py`; here nothing runs, so commands for a GPU, a
cluster or data of one's own are checked too.
"""

import re
import shlex
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from sortedrl.cli import COMMANDS, train
from sortedrl.config.parsing import read_toml, settings_over
from sortedrl.config.sizes import with_siblings
from sortedrl.config.train import SupervisedSettings, TrainSettings
from sortedrl.errors import SortedRLError
from sortedrl.simulate.settings import Simulation

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(r"^(`{3,})(\w*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
SHELLS = ("sh", "bash", "console")
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


def lines_of(text):
    """The lines of shell text, with those that go on joined."""
    return text.replace("\\\n", " ").splitlines()


def commands_in(page):
    """Every `sortedrl ...` of a page: in blocks of shell, and in the text."""
    text = page.read_text()
    for _, language, body in BLOCK.findall(text):
        if language in SHELLS:
            for line in lines_of(body):
                line = line.removeprefix("$ ").strip()
                if re.match(r"(\S*/)?sortedrl ", line):
                    yield line
    yield from re.findall(r"`(sortedrl [^`\n]*)`", BLOCK.sub("", text))


def commands_in_source(path):
    """The commands that a help text, a docstring or a comment shows, each on a line of its own."""
    for line in lines_of(path.read_text()):
        found = re.match(r"\s*(?:#\s*)?(sortedrl (\w+)\b[^\"]*)$", line)
        if found and found.group(2) in COMMANDS:
            yield re.split(r"\s{2,}|\s+#\s", found.group(1))[0]


SOURCES = [*sorted((ROOT / "src" / "sortedrl" / "cli").glob("*.py"))]
SOURCES += [path for path in sorted((ROOT / "examples").rglob("*")) if path.is_file()]


def shown():
    """Every command with the page that shows it; one that only names a command is left out."""
    pairs = [(page, command) for page in PAGES for command in commands_in(page)]
    pairs += [(path, command) for path in SOURCES for command in commands_in_source(path)]
    seen = set()
    for path, command in pairs:
        if command not in seen and not re.search(r"\.\.\.|\||[A-Z]\?|…", command.split(">")[0]):
            seen.add(command)
            yield pytest.param(command, id=f"{path.relative_to(ROOT)}: {command}")


class Parsed(Exception):
    """The command line was read, and nothing of the command has run."""


def stopping(parse):
    def parsed(*arguments, **options):
        parse(*arguments, **options)
        raise Parsed

    return parsed


_CLUSTER = "[cluster]\nrollout_workers = 1\n"


def prepared(words):
    """The files that the words name, as far as a parser reads them."""
    for word in words:
        path = Path(word)
        if path.is_absolute() or path.exists():
            continue
        if word.endswith(".toml"):
            path.parent.mkdir(parents=True, exist_ok=True)
            has_original = (ROOT / path).exists()
            stand_in = _CLUSTER if "cluster" in " ".join(words) else ""
            path.write_text((ROOT / path).read_text() if has_original else stand_in)
    if words[0] == "train":
        for word in words[1:]:
            if word.startswith(("runs/", "RUN")) and not word.endswith(("/model", ".toml")):
                Path(word).mkdir(parents=True, exist_ok=True)
                (Path(word) / "config.toml").write_text("")
                (Path(word) / "run.json").write_text("{}")


@pytest.mark.parametrize("command", list(shown()))
def test_a_shown_command_is_one_that_its_parser_takes(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(re.split(r"[>;&]", command)[0], comments=True)[1:]
    name, *rest = words
    if name.startswith("-"):
        assert name in ("--help", "--version")
        return
    assert name in COMMANDS or name == "COMMAND"
    if not rest or name == "COMMAND" or rest in (["--help"], ["--help-all"]):
        return
    prepared(words)
    if name == "train":
        train._given(rest)
        return
    module = import_module(f"sortedrl.cli.{name}")
    for attribute in ("parse", "parse_over_settings"):
        if attribute in vars(module):
            monkeypatch.setattr(module, attribute, stopping(vars(module)[attribute]))
    if name in ("compare", "simulate", "tune", "fit") and rest[0].endswith((".jsonl", ".csv")):
        rest = ["paper", *rest[1:]]  # a log that an earlier command has written
    with pytest.raises(Parsed):
        module.run(rest)


def tables():
    for page in PAGES:
        for _, language, body in BLOCK.findall(page.read_text()):
            if language == "toml":
                first = body.strip().splitlines()[0]
                yield pytest.param(body, id=f"{page.relative_to(ROOT)}: {first}")


@pytest.mark.parametrize("body", list(tables()))
def test_a_shown_settings_file_is_one_that_a_command_takes(body, tmp_path):
    path = tmp_path / "shown.toml"
    path.write_text(body)
    refused = []
    for kind in (TrainSettings, SupervisedSettings, Simulation):
        table = read_toml(path)
        table = with_siblings(table) if kind is TrainSettings else table
        try:
            settings_over(kind(), table, path=path)
        except SortedRLError as error:
            refused.append(str(error))
        else:
            return
    pytest.fail("\n".join(refused))


@pytest.mark.parametrize(
    "flags",
    [
        ["--prompt-field", "question"],
        ["--answer-field", "label"],
        ["--time-limit-seconds", "5"],
        ["--system", "Be brief."],
    ],
)
def test_a_flag_of_eval_for_rows_and_rewards_is_one_of_train_too(flags, monkeypatch):
    train._given(flags)
    module = import_module("sortedrl.cli.eval")
    monkeypatch.setattr(module, "parse", stopping(module.parse))
    with pytest.raises(Parsed):
        module.run(["MODEL", *flags])


def anchor(heading):
    """The anchor of a heading, as the site and code hosts make it."""
    text = re.sub(r"`|\[([^\]]*)\]\([^)]*\)|\*", lambda m: m.group(1) or "", heading)
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", text.lower()).strip())


def anchors(page):
    text = BLOCK.sub("", page.read_text())
    return {anchor(heading) for heading in HEADING.findall(text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file_and_a_heading(page):
    for is_picture, target in LINK.findall(BLOCK.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{target} is not there"
        assert not is_picture or found.suffix in (".svg", ".png")
        if fragment and found.suffix == ".md" and "<!-- generated:" not in found.read_text():
            assert fragment in anchors(found), f"{target} has no such heading"


def test_every_page_stands_in_the_navigation():
    class Loader(yaml.SafeLoader):
        """Reads mkdocs.yml without what only mkdocs knows."""

    def paths(node):
        if isinstance(node, str):
            yield node
        elif isinstance(node, dict):
            for value in node.values():
                yield from paths(value)
        else:
            for value in node:
                yield from paths(value)

    navigation = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]
    listed = list(paths(navigation))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages == set(listed), "add the page to nav in mkdocs.yml"
    assert len(listed) == len(set(listed))


def test_no_page_names_a_place_of_somebodys_machine():
    for page in PAGES:
        found = re.search(r"(?<![\w/])/(?:work|home|root|Users)/", page.read_text())
        assert found is None, f"{page.name}: {found.group() if found else ''}"


def test_every_key_that_a_row_of_metrics_can_have_is_described():
    from sortedrl.core.meter import Figures, numbers

    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    keys = re.findall(r"^\| `(\S+)` \|", page, re.MULTILINE)
    assert "gap/max" in keys
    assert len(keys) == len(set(keys))
    # A part in capitals stands for a name.
    patterns = [re.sub("PART|TASK|AGE", ".+", re.escape(key)) for key in keys]
    for name in numbers(Figures()):
        assert any(re.fullmatch(pattern, f"rollout/{name}") for pattern in patterns), name


def site_hooks():
    spec = spec_from_file_location("site_hooks", ROOT / "docs" / "site" / "hooks.py")
    hooks = module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return hooks


def test_a_link_that_leaves_the_pages_leads_to_the_repository_on_the_site(monkeypatch):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="how-to/page.md"))
    text = "[loop](../../src/sortedrl/core/loop.py) and [results](../results.md#a)"
    hooks = site_hooks()
    monkeypatch.delenv("SORTEDRL_REPOSITORY", raising=False)
    plain = hooks.on_page_markdown(text, page=page)
    assert plain == "loop (`src/sortedrl/core/loop.py`) and [results](../results.md#a)"
    monkeypatch.setenv("SORTEDRL_REPOSITORY", "https://example.org/o/n/")
    linked = hooks.on_page_markdown(text, page=page)
    assert "[loop](https://example.org/o/n/blob/main/src/sortedrl/core/loop.py)" in linked
    assert "[results](../results.md#a)" in linked


def test_the_reference_has_every_command_setting_and_event():
    parts = site_hooks().parts()
    named = set()
    for page in (ROOT / "docs").rglob("*.md"):
        named |= set(re.findall(r"^<!-- generated: ([a-z-]+) -->$", page.read_text(), re.MULTILINE))
    assert named == parts.keys()
    cli = parts["cli"]()
    assert all(f"## sortedrl {name}\n" in cli for name in COMMANDS)
    assert "| `--lookaheads` |" in cli
    config = parts["config"]()
    assert "## `[schedule]`" in config
    assert "| `max_staleness` | int |" in config
    assert "### `hand_over`" in parts["events"]()
    assert "vLLM" in parts["engine-versions"]()


@pytest.mark.parametrize(
    "page", ["README.md", "docs/start/quickstart.md", "docs/tutorials/gsm8k.md"]
)
def test_a_page_installs_what_its_maths_task_needs(page):
    text = (ROOT / page).read_text()
    assert "gsm8k" in text
    installed = [
        extras.split(",") for extras in re.findall(r"pip install '?sortedrl\[(.+?)\]", text)
    ]
    assert any({"data", "maths"} <= set(extras) for extras in installed)
