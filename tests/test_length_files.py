from dataclasses import replace

import pytest

from sortedrl.core.buffer import open_group
from sortedrl.core.events import EventFile
from sortedrl.errors import DataError
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.lengths import Lengths, LengthSettings, read_lengths
from sortedrl.simulate.settings import PRESETS
from sortedrl.types import Prompt


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "3\n5\n8\n"),
        ("a.csv", "id,length\n1,3\n2,5\n3,8\n"),
        ("a.csv", "tokens\n3\n\n5\n8"),
        ("a.jsonl", "3\n5\n8\n"),
        ("a.jsonl", '{"length": 3}\n{"length": 5.0}\n\n{"tokens": 8}\n'),
        ("a.csv", '"3"\n" 5 "\n8e0\n'),
        ("a.csv", '\n\nid,"Length"\r\n1,"3"\r\n2,5\r\n3,8\r\n'),
        ("a.jsonl", '{"length": "3"}\n5\n"8"\n'),
    ],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_lengths_are_read_in_order_with_or_without_a_byte_order_mark(name, content, mark, tmp_path):
    path = tmp_path / name
    path.write_text(mark + content)
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
        ("a.csv", "3\n-5\n", 2, "got '-5'"),
        ("a.csv", "3\nfive\n", 2, "got 'five'"),
        ("a.csv", "3\ninf\n", 2, "got 'inf'"),
        ("a.csv", "inf\n", 1, "got 'inf'"),
        ("a.csv", "3\n-inf\n", 2, "got '-inf'"),
        ("a.csv", "3\nnan\n", 2, "got 'nan'"),
        ("a.csv", "3\n0\n", 2, "got '0'"),
        ("a.csv", "3\n1e18\n", 2, "at most 1,000,000,000, got '1e18'"),
        ("a.csv", "3\n1e999\n", 2, "got '1e999'"),
        ("a.csv", "3;5;8\n", 1, "header must name one of"),
        ("a.csv", "3\n5;8\n", 2, "got '5;8'"),
        ("a.csv", "id;length\n1;3\n", 1, "commas go between columns"),
        ("a.csv", "\n\nid,words\n1,3\n", 3, "header must name one of length"),
        ("a.jsonl", "3\nInfinity\n", 2, "got inf"),
        ("a.jsonl", '{"length": NaN}\n', 1, "got nan"),
        ("a.jsonl", '{"length": -3}\n', 1, "got -3"),
        ("a.jsonl", '{"length": null}\n', 1, "got None"),
        ("a.jsonl", '{"length": 1' + 400 * "0" + "}\n", 1, "a length must be"),
        ("a.jsonl", "9" * 5000 + "\n", 1, "not JSON"),
        ("a.jsonl", "[" * 200_000 + "\n", 1, "not JSON"),
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
        ("a.csv", b"", "has no lengths"),
        ("a.csv", b"\xef\xbb\xbf", "has no lengths"),
        ("a.csv", b"length\n", "has no lengths"),
        ("a.csv", b"\n\n\n", "has no lengths"),
        ("a.jsonl", b"", "has no lengths"),
        ("a.csv", b"3" * 200_000, "not CSV"),
        ("a.csv", "3\n".encode("utf-16"), "not UTF-8"),
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


def test_a_length_that_grows_beyond_all_numbers_is_the_limit():
    lengths = Lengths(
        LengthSettings(sigma=1e8, drift=0.99), seed=0, max_tokens=50, samples_per_prompt=1
    )
    mixed = Lengths(
        LengthSettings(components=((1, 1e8, 1e8),)), seed=0, max_tokens=50, samples_per_prompt=1
    )
    prompts = [Prompt(id=number) for number in range(20)]
    answers = open_group(prompts, group=0, samples_per_prompt=1, seed=0)
    for version in (0, 10, 10**6):
        for answer in answers:
            assert 1 <= lengths.length(answer, version=version) <= 50
            assert 1 <= mixed.length(answer, version=version) <= 50


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
