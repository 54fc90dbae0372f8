"""Fuzz the package: `make fuzz`, or `python tests/fuzz --minutes 60`.

Each fuzzer runs its cases in a process of its own, one after another, within a time limit for each.
A case follows from the seed and its number. What is found is written to a folder, with the case and
the command that runs it again; the same fault is written once and counted.

    python tests/fuzz --minutes 5                     all fuzzers, five minutes together
    python tests/fuzz --only config --cases 1000      one of them, so many cases
    python tests/fuzz --replay fuzz-findings/config-1 a finding once more, with its traceback

Ends with code 0 if nothing was found, and with code 1 otherwise.
"""

import argparse
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from random import Random

NEEDS = {
    "config": (),
    "rows": ("transformers",),
    "answers": ("math_verify", "reasoning_gym"),
    "checkpoints": ("torch", "transformers"),
    "faults": (),
}
NAMES = ("config", "rows", "answers", "checkpoints")
"""The default fuzzers: `faults` fails on purpose, to test this program."""
_START_SECONDS = 180.0
_MEMORY_BYTES = 24 << 30


def main():
    """Fuzz, or run one finding again."""
    given = _arguments()
    if given.child:
        _be_child(given.child, Path(given.scratch))
        return 0
    if given.replay:
        return _replay(given.replay)
    seed = given.seed if given.seed is not None else int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}; once more: python tests/fuzz --seed {seed}", flush=True)
    names = given.only or NAMES
    seconds = 60 * given.minutes / len(names)
    rows = []
    for name in names:
        rows.append(_fuzz(name, seed, seconds=seconds, cases=given.cases, out=given.out))
        print(_line(rows[-1]), flush=True)
    print(f"\n{'fuzzer':<14}{'cases':>8}{'refused':>9}{'findings':>10}{'seconds':>9}")
    for name, cases, refused, findings, took, _ in rows:
        print(f"{name:<14}{cases:>8}{refused:>9}{len(findings):>10}{took:>9.0f}")
    for *_, findings, _, places in rows:
        for title, times in findings.items():
            print(f"\n{title} ({times} times)\n  python tests/fuzz --replay {places[title]}")
    return 1 if any(row[3] for row in rows) else 0


def _arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="for all fuzzers together")
    parser.add_argument("--cases", type=int, help="at most so many cases of each fuzzer")
    parser.add_argument("--only", nargs="+", choices=NEEDS, help="these fuzzers; by default all")
    parser.add_argument("--seed", type=int, help="by default another one each time")
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"), help="for findings")
    parser.add_argument("--replay", type=Path, help="the folder of a finding, to run it again")
    parser.add_argument("--child", choices=NEEDS, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", help=argparse.SUPPRESS)
    return parser.parse_args()


def _line(row):
    name, cases, refused, findings, took, _ = row
    return f"{name}: {cases} cases in {took:.0f} s, {refused} refused, {len(findings)} findings"


def _fuzz(name, seed, *, seconds, cases, out):
    """Run one fuzzer; its name, cases, refusals, findings by title, seconds and their places."""
    found, places, done, refused = {}, {}, 0, 0
    began = time.monotonic()
    missing = [package for package in NEEDS[name] if find_spec(package) is None]
    if missing:
        print(f"{name}: left out, because {', '.join(missing)} is not installed", flush=True)
        return name, 0, 0, found, 0.0, places
    with tempfile.TemporaryDirectory() as scratch:
        child = None
        try:
            while time.monotonic() - began < seconds and (cases is None or done < cases):
                child = child or _Child(name, Path(scratch))
                done += 1
                case, finding, is_refused = child.run(f"{seed}/{name}/{done}")
                refused += is_refused
                if finding is None:
                    continue
                title = f"{name}: {finding['title']}"
                found[title] = found.get(title, 0) + 1
                if found[title] == 1:
                    places[title] = _written(out, name, case, finding, child.folder)
                    print(f"  found {title}", flush=True)
                if finding["is_dead"]:
                    child.end()
                    child = None
        finally:
            if child is not None:
                child.end()
    return name, done, refused, found, time.monotonic() - began, places


def _written(out, name, case, finding, folder):
    """Keep what it takes to see a finding again."""
    out.mkdir(parents=True, exist_ok=True)
    number = 1
    while (out / f"{name}-{number}").exists():
        number += 1
    place = out / f"{name}-{number}"
    place.mkdir()
    (place / "case.json").write_text(json.dumps({"fuzzer": name, "case": case}))
    (place / "finding.txt").write_text(f"{finding['title']}\n\n{finding['words']}\n")
    if (folder / "kept").exists():
        shutil.copytree(folder / "kept", place / "kept", symlinks=True)
    return place


class _Child:
    """A process that runs the cases of one fuzzer, until one of them kills it or takes too long."""

    def __init__(self, name, scratch):
        """Start it, and wait until it is ready."""
        self.folder = scratch / "case"
        words = [sys.executable, str(Path(__file__).parent), "--child", name]
        self._process = subprocess.Popen(
            [*words, "--scratch", str(scratch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._unread = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        ready = self._heard(_START_SECONDS)
        if ready is None:
            self.end()
            raise SystemExit(f"the fuzzer {name} did not start; see what it printed above")
        self._seconds = ready["seconds"]

    def run(self, key):
        """The case of a key, what was found, and whether it was refused."""
        self._say(key)
        message = self._heard(_START_SECONDS)
        case = None if message is None else message["case"]
        verdict = None if message is None else self._heard(self._seconds)
        if verdict is not None:
            return case, verdict["finding"], verdict["is_refused"]
        is_slow = self._process.poll() is None
        if is_slow:
            title = f"took more than {self._seconds:.0f} seconds ({_kind(case)})"
        else:
            title = f"the process died with code {self._process.returncode} ({_kind(case)})"
        return case, {"title": title, "words": json.dumps(case)[:2000], "is_dead": True}, False

    def end(self):
        """End it, and what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._selector.close()
        self._process.stdout.close()

    def _say(self, key):
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(key).encode() + b"\n")
            self._process.stdin.flush()

    def _heard(self, seconds):
        """The next thing it says; `None` if it says nothing in time, or is dead."""
        until = time.monotonic() + seconds
        while b"\n" not in self._unread:
            if not self._selector.select(max(0.0, until - time.monotonic())):
                return None
            more = os.read(self._process.stdout.fileno(), 1 << 16)
            if not more:
                self._process.wait()
                return None
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


def _kind(case):
    """A few words about a case, to tell such findings apart."""
    shown = {k: v for k, v in (case or {}).items() if k in ("kind", "action", "name", "command")}
    gym = (case or {}).get("fields", {}).get("gym")
    return ", ".join([*map(str, shown.values()), *([gym] if gym else [])])


def _be_child(name, scratch):
    """Run the cases that are asked for on standard input, and say what became of each."""
    voice = os.fdopen(os.dup(1), "w")
    log = os.open(scratch / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    _limit_memory()
    from fuzzers import FUZZERS

    fuzzer = FUZZERS[name](scratch)

    def say(message):
        voice.write(json.dumps(message) + "\n")
        voice.flush()

    say({"seconds": fuzzer.seconds})
    for line in sys.stdin:
        case = fuzzer.case(Random(json.loads(line)))
        say({"case": case})
        say(_verdict(fuzzer, case, scratch / "case"))


def _verdict(fuzzer, case, folder, *, kept=None):
    from fuzzers import emptied, place_of

    emptied(folder)
    if kept is not None:
        shutil.copytree(kept, folder / "kept", symlinks=True)
    os.chdir(emptied(folder / "here"))
    try:
        is_refused = bool(fuzzer.run(case, folder))
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001  everything else is what is looked for
        words = "".join(traceback.format_exception(error))
        title = f"{type(error).__name__} at {place_of(error)}"
        return {"finding": {"title": title, "words": words, "is_dead": False}, "is_refused": False}
    return {"finding": None, "is_refused": is_refused}


def _limit_memory():
    """A case that wants the whole machine gets an error in place of it."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


def _replay(place):
    from fuzzers import FUZZERS

    finding = json.loads((place / "case.json").read_text())
    kept = place.absolute() / "kept"
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        fuzzer = FUZZERS[finding["fuzzer"]](Path(scratch))
        verdict = _verdict(
            fuzzer, finding["case"], Path(scratch) / "case", kept=kept if kept.exists() else None
        )
        os.chdir(here)
    print(verdict["finding"]["words"] if verdict["finding"] else "nothing is found any more")
    return 1 if verdict["finding"] else 0


if __name__ == "__main__":
    sys.exit(main())
