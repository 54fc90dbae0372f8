"""A file is new as a whole, or the old one is untouched."""

import os
from pathlib import Path

import pytest

from sortedrl.cli import main
from sortedrl.core.files import write_whole


def test_a_file_is_written_and_replaced(tmp_path):
    path = tmp_path / "a.json"
    for content in (b"one", b"another"):
        write_whole(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_is_full_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_whole(path, b"old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_through_a_link_its_target_is_written_and_a_device_stays_one(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    write_whole(Path(os.devnull), b"new")
    assert Path(os.devnull).is_char_device()


@pytest.fixture
def log(tmp_path):
    """The log of a simulated run in a folder of its own."""
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "events.jsonl"
    assert main(["simulate", "six", "--json", "--events", str(path)]) == 0
    return path


WRITERS = {
    "report": (["report", "LOG", "--out", "FILE"], "page.html"),
    "trace": (["trace", "LOG", "--out", "FILE"], "trace.json"),
    "packed trace": (["trace", "LOG", "--out", "FILE"], "trace.json.gz"),
    "plot": (["plot", "slots", "LOG", "--out", "FILE"], "slots.svg"),
    "simulate": (["simulate", "six", "--plot", "FILE"], "six.svg"),
    "events": (["simulate", "six", "--events", "FILE"], "six.jsonl"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_a_command_wrote_is_replaced_and_nothing_else(tmp_path, capsys, log, name):
    words, file = WRITERS[name]
    path = tmp_path / file
    given = [str({"LOG": log, "FILE": path}.get(word, word)) for word in words]
    path.touch()
    assert main(given) == 0
    first = path.read_bytes()
    assert main(given) == 0
    assert path.read_bytes() == first
    for mine in (b"mine", b'{"prompt": "mine"}\n', b"\x1f\x8bmine", b"<svg>mine</svg>", b"<html>"):
        path.write_bytes(mine)
        assert main(given) == 2
        assert f"{path}: is a file" in capsys.readouterr().err
        assert path.read_bytes() == mine


def test_rows_are_written_over_nothing(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    words = ["data", "generate", "knights_knaves:people=2,count=2", "--out", str(path)]
    assert main(words) == 0
    rows = path.read_bytes()
    assert main(words) == 2
    assert "rows.jsonl: is a file and is not replaced" in capsys.readouterr().err
    assert path.read_bytes() == rows


def test_the_log_of_a_real_run_is_not_replaced_by_that_of_a_simulation(log):
    (log.parent / "config.toml").touch()
    assert main(["simulate", "six", "--events", str(log)]) == 2
