from dataclasses import replace

import pytest

from sortedrl.compare import simulate
from sortedrl.errors import DataError
from sortedrl.events import EventFile
from sortedrl.simulate.length_files import read_lengths
from sortedrl.simulate.presets import PRESETS


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "3\n5\n8\n"),
        ("a.csv", "id,length\n1,3\n2,5\n3,8\n"),
        ("a.csv", "tokens\n3\n\n5\n8"),
        ("a.jsonl", "3\n5\n8\n"),
        ("a.jsonl", '{"length": 3}\n{"length": 5.0}\n\n{"tokens": 8}\n'),
    ],
)
def test_lengths_are_read_in_order(name, content, tmp_path):
    path = tmp_path / name
    path.write_text(content)
    assert read_lengths(path) == [3, 5, 8]


def test_the_events_of_a_run_give_its_lengths_in_the_order_of_the_data_set(tmp_path):
    path = tmp_path / "events.jsonl"
    record = EventFile(path)
    simulate(PRESETS["six"](), record=record)
    record.close()
    assert read_lengths(path) == [2, 7, 3, 5, 4, 9]


@pytest.mark.parametrize(
    ("name", "content", "line", "said"),
    [
        ("a.csv", "3\n-5\n", 2, "at least 1 token, got '-5'"),
        ("a.csv", "3\nfive\n", 2, "got 'five'"),
        ("a.csv", "3\n2.5\n", 2, "got '2.5'"),
        ("a.csv", "id,words\n1,3\n", 1, "header must name one of length"),
        ("a.csv", "id,length\n1,3\n2\n", 3, "row has no column 2"),
        ("a.jsonl", '{"length": 3}\n{"length": 0}\n', 2, "got 0"),
        ("a.jsonl", '{"length": 3}\n{"words": 4}\n', 2, "no field length"),
        ("a.jsonl", '3\n{"length": \n', 2, "not JSON"),
        ("a.jsonl", "true\n", 1, "got True"),
        ("a.jsonl", "[1, 2]\n", 1, "got [1, 2]"),
    ],
)
def test_a_malformed_line_is_refused_with_file_line_and_reason(name, content, line, said, tmp_path):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        read_lengths(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"", "holds no length"),
        ("a.csv", b"\xff\xfe3", "not UTF-8"),
        ("a.txt", b"3\n", "read from .csv and .jsonl"),
        ("a.jsonl", b'{"event":"begin","seconds":0}\n', "must have the fields"),
    ],
)
def test_an_unusable_file_is_refused_with_what_to_do(name, content, said, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=str(path)) as caught:
        read_lengths(path)
    assert said in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read_lengths(tmp_path / "absent.csv")


def test_observed_lengths_drive_a_run(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("10\n20\n")
    six = PRESETS["six"]()
    lengths = replace(six.lengths, values=(), length_file=path)
    outcome = simulate(replace(six, lengths=lengths, engine=replace(six.engine, max_tokens=99)))
    assert sorted(tokens for _, _, tokens in outcome.metrics.trained_lengths) == [10] * 3 + [20] * 3
