"""TOML: what is written is read back, and what cannot be read is named."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.arguments import all_to_toml, settings_over
from sortedrl.errors import DataError
from sortedrl.toml_file import read_toml, toml_value
from sortedrl.training.settings import TrainSettings

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | TEXTS


@given(st.recursive(SCALARS, st.lists, max_leaves=5))
def test_a_value_is_shown_as_toml_would_read_it_back(value):
    assert tomllib.loads(f"x = {toml_value(value)}")["x"] == value


def test_a_table_in_a_list_is_shown_inline():
    text = toml_value([{"a": 1, "b": ["x"]}])
    assert tomllib.loads(f"x = {text}")["x"] == [{"a": 1, "b": ["x"]}]


def test_a_path_is_its_text():
    assert toml_value(Path("runs") / 'a "b"') == '"runs/a \\"b\\""'


@given(TEXTS.filter(lambda text: text != "None"))
def test_settings_with_any_text_are_read_back_from_a_run_s_config(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("run") / "config.toml"
    settings = TrainSettings(model=text)
    path.write_text(all_to_toml(settings, TrainSettings()), encoding="utf-8")
    assert settings_over(TrainSettings(), read_toml(path), path=path, is_dotted=True) == settings


@pytest.mark.parametrize("content", [b"a = = 1\n", b"\xff\n"])
def test_a_file_that_is_no_toml_is_named(tmp_path, content):
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"config\.toml: not TOML"):
        read_toml(path)
    with pytest.raises(DataError, match=r"missing\.toml: cannot be read"):
        read_toml(tmp_path / "missing.toml")
