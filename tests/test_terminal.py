import pytest

from sortedrl import terminal
from sortedrl.errors import DataError
from sortedrl.terminal import percent, progress, table, thousands, write_text


def test_progress_away_from_a_terminal_is_an_occasional_plain_line(capsys, monkeypatch):
    seconds = iter([0.0, 1.0, 6.0, 7.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(seconds))
    with progress(4) as advance:
        for done in (1, 2, 3):
            advance("working", done)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "50 % working\n"


def test_a_table_keeps_its_columns_whole(capsys):
    table(["name", "value"], [["long " * 20, "1"], ["b", "22"]])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[2].rstrip().endswith("22")


def test_numbers_read_well():
    assert percent(0.1234) == "12.3 %"
    assert thousands(12345.6) == "12,346"
    assert thousands(3.21) == "3.2"
    assert thousands(3.0) == "3"


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.svg"
    write_text(path, "new")
    assert path.read_text() == "new"
    with pytest.raises(DataError, match="cannot be written"):
        write_text(tmp_path / "absent" / "a.svg", "new")
    assert list(tmp_path.iterdir()) == [path]
