import pytest

from report_worlds import MARKUP
from sortedrl.errors import DataError
from sortedrl.evaluation.tables import percent
from sortedrl.report import terminal
from sortedrl.report.terminal import progress, table, thousands, write_text


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


@pytest.mark.parametrize("width", [80, 40])
def test_a_table_on_a_narrow_terminal_folds_names_into_readable_parts_and_no_number(
    capsys, monkeypatch, width
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", "25")  # rich ignores the width of a dumb terminal without it
    name, numbers = "tail_batching/on_policy", ["1234567.8"] * 6
    table(["strategy/mode", *"abcdef"], [[name, *numbers]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[1:] == numbers
    assert len(lines[1].split()[0]) >= 12
    assert "".join(line.split()[0] for line in lines[1:]) == name
    assert all(len(line.rstrip()) <= 80 for line in lines)


def test_a_table_that_just_fits_a_terminal_folds_nothing(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "25")
    numbers = ["12345678"] * 7
    table(["strategy/mode", *"abcdefg"], [["sorted/on_policy", *numbers]])
    heading, line = capsys.readouterr().out.splitlines()
    assert line.split() == ["sorted/on_policy", *numbers]
    assert len(heading.rstrip()) == len(line.rstrip()) == 79


def test_nothing_in_a_table_is_read_as_markup(capsys):
    table(MARKUP[:3], [[text, text, "1"] for text in MARKUP])
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == list(MARKUP[:3])
    assert [line.split() for line in lines] == [[text, text, "1"] for text in MARKUP]


def test_a_cell_stays_on_its_line_and_moves_no_cursor(capsys):
    table(["name"], [["a\nb\x1b[2J\r\ud800"]])
    assert capsys.readouterr().out.splitlines()[1].rstrip() == "a\ufffdb\ufffd[2J\ufffd\ufffd"


def test_nothing_in_a_progress_bar_is_read_as_markup(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    for text in MARKUP:
        with progress(1.0) as advance:
            advance(text, 0.5)
        assert text in capsys.readouterr().err


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
