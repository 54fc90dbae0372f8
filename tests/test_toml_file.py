"""TOML: what is written is read back, and what cannot be read is named."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.cli.arguments import parse
from sortedrl.cli.train import Arguments
from sortedrl.config.toml import RENAMED_KEYS, read_toml, settings_over, settings_to_toml, toml_text
from sortedrl.config.train import TrainSettings
from sortedrl.errors import ConfigError, DataError

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


def table_with(key, value):
    section, name = key.split(".")
    return {section: {name: value}}


def value_of(settings, key):
    section, name = key.split(".")
    return getattr(getattr(settings, section), name)


@pytest.mark.parametrize("old", RENAMED_KEYS)
def test_a_renamed_key_is_refused_with_its_new_name_in_a_file_and_as_a_flag(old):
    new = RENAMED_KEYS[old]
    value = value_of(TrainSettings(), new)
    value = "None" if value is None else value
    with pytest.raises(DataError, match=rf"mine\.toml: .*{old} is now {new}"):
        settings_over(TrainSettings(), table_with(old, value), path=Path("mine.toml"))
    flag = f"--{old}".replace("_", "-")
    with pytest.raises(ConfigError, match=rf"{flag} is now --{new.replace('_', '-')}"):
        parse(Arguments, [flag, str(value)], prog="x", description="", is_dotted=True)


def test_a_run_saved_under_the_old_keys_is_read():
    table = {"passes": {"tokens": 7, "compiled": False}, "optimiser": {"steps": 3}}
    settings = settings_over(TrainSettings(), table, path=Path("config.toml"), takes_old_keys=True)
    assert settings.passes.micro_batch_tokens == 7
    assert settings.optimiser.mini_batches == 3
    assert table["passes"] == {"tokens": 7, "compiled": False}


def test_a_key_under_both_names_is_refused():
    table = {"passes": {"tokens": 7, "micro_batch_tokens": 8}}
    with pytest.raises(DataError, match=r"got both; remove passes\.tokens"):
        settings_over(TrainSettings(), table, path=Path("config.toml"), takes_old_keys=True)
