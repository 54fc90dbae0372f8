import gzip
import json

import pytest

from sortedrl.cli import trace
from sortedrl.core.events import EventFile
from sortedrl.errors import DataError
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.settings import PRESETS


@pytest.fixture
def folder(tmp_path):
    """A run's folder with nothing but its events."""
    path = tmp_path / "mine"
    path.mkdir()
    file = EventFile(path / "events.jsonl")
    simulate(PRESETS["six"](), record=file)
    file.close()
    return path


def test_a_folder_gets_its_trace_beside_its_events(folder, capsys):
    trace.run([str(folder)])
    written = json.loads((folder / "trace.json").read_text())
    assert written["otherData"]["run"] == "mine"
    out, err = capsys.readouterr()
    assert err == f"wrote {folder / 'trace.json'}\n"
    assert "of mine: " in out
    assert "ui.perfetto.dev" in out


def test_a_log_alone_gets_its_trace_beside_it_too(folder, capsys):
    trace.run([str(folder / "events.jsonl"), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["path"] == str(folder / "trace.json")
    assert told["bytes"] == (folder / "trace.json").stat().st_size
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    assert sum(told["counts"][kind] for kind in ("slots", "updates", "rounds", "groups")) <= len(
        bars
    )
    assert told["counts"]["slots"] == sum(bar["cat"] == "slots" for bar in bars) > 0
    assert told["seconds"] == max(event["ts"] + event.get("dur", 0) for event in bars) / 1e6


def test_a_path_of_ones_own_may_be_packed(folder, tmp_path):
    trace.run([str(folder), "--out", str(tmp_path / "t.json")])
    trace.run([str(folder), "--out", str(tmp_path / "t.json.gz")])
    assert (
        gzip.decompress((tmp_path / "t.json.gz").read_bytes()) == (tmp_path / "t.json").read_bytes()
    )
    assert not (folder / "trace.json").exists()


def test_a_run_torn_in_the_middle_of_a_line_gives_a_trace_as_far_as_it_came(folder, capsys):
    log = folder / "events.jsonl"
    whole = log.read_bytes()
    trace.run([str(folder), "--json"])
    before = json.loads(capsys.readouterr().out)
    log.write_bytes(whole[: int(0.6 * len(whole))])
    trace.run([str(folder), "--json"])
    after = json.loads(capsys.readouterr().out)
    assert 0 < after["counts"]["slots"] < before["counts"]["slots"]
    assert 0 < after["seconds"] < before["seconds"]


def test_what_is_no_run_is_refused(tmp_path):
    (tmp_path / "lengths.jsonl").write_text('{"length":3}\n')
    (tmp_path / "mine.toml").write_text("groups = 2\n")
    for path in (tmp_path, tmp_path / "lengths.jsonl", tmp_path / "mine.toml"):
        with pytest.raises(DataError, match="must be a run folder with events"):
            trace.run([str(path)])
