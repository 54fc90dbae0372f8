"""What is released: the README with absolute links, the extras, the files of the source archive."""

import re
import sys
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import sortedrl

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REPOSITORY = "https://example.org/owner/sortedrl"


def build_hook(monkeypatch):
    """hatch_build.py, which only the build's own environment can import as it is."""
    interface = ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = object
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_link_and_picture_of_the_released_readme_is_absolute(monkeypatch):
    hook = build_hook(monkeypatch)
    readme = (ROOT / "README.md").read_text()
    text = hook.absolute(readme, repository=REPOSITORY, tag="v1.2.3")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(targets) > 10
    assert all(target.startswith("https://") for target in targets)
    assert f'src="{REPOSITORY}/raw/v1.2.3/docs/img/timelines.svg"' in text
    assert f"({REPOSITORY}/blob/v1.2.3/docs/results.md)" in text


def test_the_addresses_of_the_project_follow_from_that_of_the_repository(monkeypatch):
    hook = build_hook(monkeypatch)
    assert hook.urls("") == {"Paper": "https://arxiv.org/abs/2603.23414"}
    addresses = hook.urls(REPOSITORY)
    assert {"Source", "Documentation", "Changelog", "Issues", "Paper"} == addresses.keys()
    assert hook._version(ROOT) == sortedrl.__version__


def test_the_extra_all_is_every_extra_that_fits_into_one_environment():
    extras = PROJECT["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    named = set(re.fullmatch(r"sortedrl\[([\w,]+)\]", everything).group(1).split(","))
    assert extras.keys() - named == {"all", "vllm", "sglang", "trackio"}
    page = (ROOT / "docs" / "start" / "install.md").read_text()
    assert all(f"`{extra}`" in page for extra in extras)


def test_the_source_archive_has_files_that_exist_and_the_examples():
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {"examples", "docs", "tests", "hatch_build.py", "mkdocs.yml"} <= set(included)
    assert all((ROOT / path).exists() for path in included)


def test_the_change_log_begins_with_the_version_of_the_package():
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first.group(1).rstrip(",") == sortedrl.__version__
