"""Records from files: what is there comes through whole, what is malformed names its place."""

import datetime
import decimal
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.data.rows import read_hub, read_records, record_of
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


def test_numbers_of_numpy_are_numbers():
    values = {"n": np.int64(3), "x": np.float32(0.5), "list": [np.uint8(1)]}
    assert record_of(values, "row 1").values == {"n": 3, "x": 0.5, "list": [1]}
    with pytest.raises(DataError, match="row 1: the column 'x'"):
        record_of({"x": np.float64("inf")}, "row 1")


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
        ("rows.jsonl.gz", b"\x1f\x8b", ": must end in .jsonl, .json or .parquet"),
        ("packed.jsonl", b"\x1f\x8b\x08\x00", ": is compressed with gzip; unpack it"),
        ("packed.json", b"\x1f\x8b\x08\x00", ": is compressed with gzip; unpack it"),
        ("wide.jsonl", '{"a": 1}'.encode("utf-16"), ":1: not UTF-8"),
        ("empty.json", b"", ":1: not JSON"),
        ("empty.parquet", b"", ": not Parquet"),
        ("nul.jsonl", b'{"a": "\x00"}', ":1: not JSON: Invalid control character"),
        ("huge.jsonl", b"\n{" + b'"a": ' + b"9" * 5000 + b"}", ":2: a whole number must have at"),
        ("huge.json", b'[{"a": [-' + b"9" * 5000 + b"]}]", ": a whole number must have at most"),
        ("deep.jsonl", b'{"a": ' + b"[" * 90_000, ":1: must be nested at most 100 levels"),
        ("deeper.json", b"[" * 90_000, ": must be nested at most 100 levels"),
        ("nested.jsonl", b'{"a": ' + b"[" * 101 + b"]" * 101 + b"}", ":1: the column 'a' must be"),
        ("half.jsonl", b'{"a": 1}\n{"a": "\\ud800"}', r":2: the column 'a' has half a"),
        ("halfname.jsonl", b'{"\\udfff": 1}', r":1: the column '\\udfff' has half a"),
        ("halfinside.json", b'[{"a": [{"b": "x\\udc00"}]}]', r":1: the column 'a' has half"),
        ("nan.jsonl", b'{"a": NaN}', ":1: numbers must be finite, got NaN; write null"),
        ("minus.json", b'[{"a": [-Infinity]}]', ": numbers must be finite, got -Infinity"),
        ("overflow.jsonl", b'{"a": 1e999}', ":1: the column 'a' must hold finite numbers"),
        ("twins.jsonl", b'{"a": 1, "digits": 2, "digits": 3}', ":1: .* got 'digits' twice"),
        ("inner.jsonl", b'{"a": {"b": 1, "b": 1}}', ":1: .* got 'b' twice"),
    ],
)
def test_what_is_malformed_is_refused_with_file_line_and_reason(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{name}{words}"):
        list(read_records(path))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text(st.characters()), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_what_is_read_can_be_written_again_or_is_refused_with_its_line(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("\n" + json.dumps({"a": value}))
    try:
        (record,) = read_records(path)
    except DataError as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is not None:
        assert refusal.startswith(f"{path}:2: ")
        return
    written = json.dumps(record.values, ensure_ascii=False, allow_nan=False).encode()
    assert json.loads(written) == record.values


def test_the_end_of_a_name_may_be_in_capitals(tmp_path):
    path = tmp_path / "ROWS.JSONL"
    path.write_text('{"a": 1}')
    assert [record.values for record in read_records(path)] == [{"a": 1}]


def test_a_byte_order_mark_before_a_list_does_no_harm(tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(b'\xef\xbb\xbf[{"a": 1}]')
    assert [record.values for record in read_records(path)] == [{"a": 1}]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_a_folder_and_a_name_that_cannot_be_one_are_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(DataError, match="must be a file, is a folder"):
        list(read_records(tmp_path / name))
    with pytest.raises(DataError, match="cannot contain a NUL character"):
        list(read_records(tmp_path / f"a\0{name}"))


UTF8 = pyarrow.array([b"gr\xc3\xbcn"])
NO_TEXT = pyarrow.array([[b"\xff\xd8"]])


@pytest.mark.parametrize(
    ("column", "value"),
    [
        (UTF8, "gr\u00fcn"),
        (pyarrow.array([{"x": [b"a", None]}]), {"x": ["a", None]}),
        (pyarrow.array([float("nan")]), None),
        (pyarrow.array([1.5], pyarrow.float16()), 1.5),
        (pyarrow.array([2**63], pyarrow.uint64()), 2**63),
        (pyarrow.array(["a"]).dictionary_encode(), "a"),
        (pyarrow.array([[("k", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())), [["k", 1]]),
        (pyarrow.array([5], pyarrow.duration("s")), "0:00:05"),
        (pyarrow.array([0], pyarrow.timestamp("us", tz="UTC")), "1970-01-01 00:00:00+00:00"),
    ],
)
def test_every_type_of_a_parquet_column_becomes_what_json_can_hold(tmp_path, column, value):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": column}), path)
    assert [record.values for record in read_records(path)] == [{"a": value}]


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (NO_TEXT, r":1: the column 'a' has bytes that are not UTF-8 text"),
        (pyarrow.array([float("-inf")]), r":1: the column 'a' must hold finite numbers, got -inf"),
        (pyarrow.array([2**60], pyarrow.timestamp("us")), ": the column 'a' cannot be read"),
        (pyarrow.array([0], pyarrow.timestamp("us", tz="No/Where")), ": the column 'a' cannot be"),
    ],
)
def test_a_parquet_column_that_json_cannot_hold_is_named(tmp_path, column, reason):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": column}), path)
    with pytest.raises(DataError, match=f"rows.parquet{reason}"):
        list(read_records(path))


def test_two_parquet_columns_of_one_name_are_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    columns = [pyarrow.array([1]), pyarrow.array([2])]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, names=["a", "a"]), path)
    with pytest.raises(DataError, match="got 'a' twice"):
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


def test_a_parquet_file_with_a_damaged_name_is_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "columnname": ["b"]}), path)
    path.write_bytes(path.read_bytes().replace(b"columnname", b"col\xbamnname"))
    with pytest.raises(DataError, match=r"rows\.parquet: not Parquet"):
        list(read_records(path))
