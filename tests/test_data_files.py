"""Records from files: what is there comes through whole, what is malformed names its place."""

import datetime
import decimal
import json

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.data.files import read_records
from sortedrl.data.hub import read_hub
from sortedrl.errors import DataError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
RECORDS = st.lists(st.dictionaries(st.text(), VALUES, max_size=4), max_size=6)


@given(RECORDS)
def test_json_lines_come_back_as_they_were_written(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    read = list(read_records(path))
    assert [record.values for record in read] == records
    assert [record.place for record in read] == [f"{path}:{n + 1}" for n in range(len(records))]


@given(RECORDS)
def test_a_json_list_comes_back_as_it_was_written(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("data") / "rows.json"
    path.write_text(json.dumps(records, indent=1))
    assert [record.values for record in read_records(path)] == records


def test_parquet_comes_back_with_values_json_can_hold(tmp_path):
    path = tmp_path / "rows.parquet"
    rows = [
        {"prompt": "a", "names": ["x", "y"], "nested": {"k": 1}, "n": 1.5},
        {"prompt": "b", "names": [], "nested": {"k": None}, "n": None},
    ]
    dated = [
        row | {"day": datetime.date(2026, 1, 2), "price": decimal.Decimal("1.10")} for row in rows
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(dated), path)
    read = list(read_records(path))
    expected = [row | {"day": "2026-01-02", "price": "1.10"} for row in rows]
    assert [record.values for record in read] == expected
    assert [record.place for record in read] == [f"{path}:1", f"{path}:2"]


def test_blank_lines_and_a_byte_order_mark_do_no_harm(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \r\n{"a": 2}')
    assert [(r.place, r.values) for r in read_records(path)] == [
        (f"{path}:1", {"a": 1}),
        (f"{path}:4", {"a": 2}),
    ]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("torn.jsonl", b'{"a": 1}\n{"a": ', ":2: not JSON: Expecting value at column 7"),
        ("list.jsonl", b'{"a": 1}\n[1, 2]\n', r":2: a row must be an object .* got \[1, 2\]"),
        ("latin.jsonl", b'{"a": "\xe9"}\n', ":1: not UTF-8"),
        ("torn.json", b'[\n{"a": 1},\n{"a"', ":3: not JSON"),
        ("object.json", b'{"a": 1}', ": must hold a list of objects"),
        ("fake.parquet", b"no parquet at all", ": not Parquet"),
        ("rows.csv", b"a,b", ": must end in .jsonl, .json or .parquet"),
    ],
)
def test_what_is_malformed_is_refused_with_file_line_and_reason(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{name}{words}"):
        list(read_records(path))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read \(No such file"):
        list(read_records(tmp_path / "none.jsonl"))


def test_data_sets_are_read_from_disk_and_by_the_name_of_a_folder(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"test": datasets.Dataset.from_list(rows[1:])}).save_to_disk(
        tmp_path / "splits"
    )
    saved = read_hub(str(tmp_path / "saved"), subset=None, split="train")
    assert [record.values for record in saved] == rows
    split = list(read_hub(str(tmp_path / "splits"), subset=None, split="test"))
    assert [record.values for record in split] == rows[1:]
    assert split[0].place == f"{tmp_path / 'splits'}/test:1"
    with pytest.raises(DataError, match="split 'train'"):
        list(read_hub(str(tmp_path / "splits"), subset=None, split="train"))


def test_a_data_set_that_cannot_be_loaded_says_what_to_do(tmp_path):
    with pytest.raises(DataError, match="check the name and the connection"):
        list(read_hub(str(tmp_path / "nothing-here"), subset=None, split="train"))
