"""TOML: what is written is read back, and what cannot be read is named."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.config.parsing import read_toml, settings_over, settings_to_toml, toml_text
from sortedrl.config.train import TrainSettings
from sortedrl.errors import DataError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | TEXTS
TABLES = st.dictionaries(
    TEXTS,
    st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner)),
    max_size=4,
)
SAYABLE = TEXTS.filter(lambda text: text.strip() and "\0" not in text and text != "None")


@given(TABLES)
def test_tables_are_read_back_as_they_were_written_whatever_their_keys(tables):
    assert tomllib.loads(toml_text(tables)) == tables


def test_a_path_is_its_text_and_none_is_left_out():
    tables = {"out": Path("runs") / 'a "b"', "inner": {"limit": None, "parts": (Path("a"), 1)}}
    expected = {"out": 'runs/a "b"', "inner": {"parts": ["a", 1]}}
    assert tomllib.loads(toml_text(tables)) == expected


@given(SAYABLE, st.lists(SAYABLE))
def test_settings_with_any_text_are_read_back_from_a_run_s_config(tmp_path_factory, text, options):
    path = tmp_path_factory.mktemp("run") / "config.toml"
    settings = TrainSettings(model=text, reward_options=tuple(options))
    path.write_text(settings_to_toml(settings, TrainSettings()), encoding="utf-8")
    assert settings_over(TrainSettings(), read_toml(path), path=path) == settings


@pytest.mark.parametrize(
    "content",
    [
        b"a = = 1\n",
        b"\xff\n",
        b"\xef\xbb\xbfa = 1\n",
        b"a = 1\na = 2\n",
        b"[a]\n[a]\n",
        b"a = " + b"9" * 5000,
        b"a = " + b"[" * 5000,
    ],
)
def test_a_file_that_is_no_toml_is_named(tmp_path, content):
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"config\.toml: not TOML"):
        read_toml(path)
    with pytest.raises(DataError, match=r"missing\.toml: cannot be read"):
        read_toml(tmp_path / "missing.toml")
