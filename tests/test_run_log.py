"""The numbers of a run on disk, one row per update."""

import json
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.core.files import MetricsFile, read_metrics
from sortedrl.errors import DataError

finite = st.none() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)
tables = st.lists(st.dictionaries(st.text(), finite, max_size=4), max_size=5)


def write(path, rows, *, keep_bytes=None):
    with closing(MetricsFile(path, keep_bytes=keep_bytes)) as file:
        for row in rows:
            file(row)
        return file.sync()


@settings(max_examples=50)
@given(tables, tables, st.binary())
def test_rows_before_the_checkpoint_and_rows_after_the_resume_read_back(before, after, lost):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        kept = write(path, before)
        path.write_bytes(path.read_bytes() + lost)
        write(path, after, keep_bytes=kept)
        assert read_metrics(path) == [*before, *after]


def test_a_number_that_is_not_finite_becomes_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [{"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 1.5, "e": "nan"}])
    nothing = dict.fromkeys("abc")
    assert read_metrics(path) == [nothing | {"d": 1.5, "e": "nan"}]
    assert "NaN" not in path.read_text()


def test_a_row_can_be_read_at_once_and_a_torn_one_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsFile(path)) as file:
        file({"step": 1})
        assert read_metrics(path) == [{"step": 1}]
    with path.open("ab") as torn:
        torn.write(b'{"step": 2}')
    assert read_metrics(path) == [{"step": 1}]


@pytest.mark.parametrize("line", ["{", "[1]", '{"a": {"b": 1}}', '{"a": [1]}', "", "3"])
def test_a_bad_row_is_refused_with_its_number(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1}) + f"\n{line}\n" + json.dumps({"step": 3}) + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: "):
        read_metrics(path)


def test_a_file_shorter_than_its_checkpoint_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kept = write(path, [{"step": 1}])
    with pytest.raises(DataError, match=f"must hold {kept + 1} bytes"):
        MetricsFile(path, keep_bytes=kept + 1)
