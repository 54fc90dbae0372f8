import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knights_reading import read_compact, read_puzzle
from sortedrl.data.knights_puzzle import canonical_key, parse_puzzle
from sortedrl.data.knights_rows import KnightsSettings, knights_rows
from sortedrl.errors import ConfigError
from test_knights_compact import check as check_compact
from test_knights_solver import brute_force
from test_knights_traces import check as check_words

FIELDS = ["names", "solution", "statements", "level", "answer", "roles", "response"]


def some_settings():
    people = st.tuples(st.integers(3, 8), st.integers(3, 8)).map(sorted).map(tuple)
    return st.builds(
        KnightsSettings,
        people=people,
        count=st.integers(1, 9),
        seed=st.integers(0, 2**32),
        split=st.sampled_from(("train", "test")),
        style=st.sampled_from(("words", "compact")),
        depth=st.integers(1, 2),
        width=st.integers(2, 3),
    )


@settings(max_examples=50)
@given(some_settings())
def test_every_row_says_what_its_puzzle_is(settings):
    rows = knights_rows(settings)
    assert len(rows) == settings.count
    assert len({row.place for row in rows}) == len(rows)
    for row in rows:
        assert list(row.fields) == FIELDS
        puzzle = parse_puzzle(row.fields["statements"])
        solution = tuple(row.fields["solution"])
        names = row.fields["names"]
        assert row.fields["level"] == puzzle.people == len(names)
        assert brute_force(puzzle.text) == {solution}
        if settings.style == "compact":
            assert read_compact(row.prompt) == puzzle
            assert tuple(map(str.isupper, row.fields["answer"])) == solution
            assert check_compact(row.prompt, row.fields["response"]) == solution
        else:
            assert [message["role"] for message in row.prompt] == ["system", "user"]
            assert read_puzzle(row.text, names) == puzzle
            assert check_words(puzzle, names, row.fields["response"]) == solution
        assert f">{row.fields['answer']}<" in row.fields["response"].replace("\n<", "<").replace(
            ">\n", ">"
        )


@settings(max_examples=20)
@given(some_settings())
def test_the_same_settings_give_the_same_rows_and_they_are_plain_json(settings):
    def lines():
        return [json.dumps([r.prompt, r.fields, r.place]) for r in knights_rows(settings)]

    first = lines()
    assert first == lines()
    for line, row in zip(first, knights_rows(settings), strict=True):
        prompt, fields, place = json.loads(line)
        assert (fields, place) == (row.fields, row.place)
        assert prompt == (row.prompt if isinstance(row.prompt, str) else list(row.prompt))


def test_rows_are_spread_evenly_over_the_levels():
    rows = knights_rows(KnightsSettings(people=(3, 6), count=23))
    assert Counter(row.fields["level"] for row in rows) == {3: 6, 4: 6, 5: 6, 6: 5}
    assert [row.fields["level"] for row in rows[:5]] == [3, 4, 5, 6, 3]


def test_train_and_test_share_no_puzzle_whatever_seed_style_and_roles():
    base = KnightsSettings(people=(3, 3), count=120, test_share=0.4)
    train = [base, replace(base, seed=5, style="compact")]
    test = [
        replace(base, split="test", seed=9),
        replace(base, split="test", roles=("hero", "liar")),
    ]

    def keys(some):
        rows = [row for each in some for row in knights_rows(each)]
        return {canonical_key(parse_puzzle(row.fields["statements"])) for row in rows}

    assert len(keys(train)) > 150
    assert not keys(train) & keys(test)


def test_the_style_changes_the_words_and_not_the_puzzles():
    base = KnightsSettings(count=10)
    one, other = knights_rows(base), knights_rows(replace(base, style="compact"))
    for left, right in zip(one, other, strict=True):
        assert left.fields["statements"] == right.fields["statements"]


def test_other_roles_are_asked_for_and_answered_with():
    (row,) = knights_rows(KnightsSettings(people=(4, 4), count=1, roles=("angel", "devil")))
    assert row.fields["roles"] == ["angel", "devil"]
    assert "(1) Zoey is an angel" in row.prompt[0]["content"]
    text = json.dumps([row.prompt, row.fields])
    assert "knight" not in text.replace("knights", "")
    assert re.fullmatch(r"(\(\d\) \w+ is (an angel|a devil)\n?){4}", row.fields["answer"])


def test_the_system_message_asks_for_both_pairs_of_tags():
    (row,) = knights_rows(KnightsSettings(count=1))
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert tag in row.prompt[0]["content"]
    assert row.text == row.prompt[1]["content"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"people": (1, 3)}, r"people must be two numbers in 2\.\.8"),
        ({"people": (5, 3)}, "the smaller first, got 5 and 3"),
        ({"people": (3, 9)}, "got 3 and 9"),
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"split": "valid"}, "unknown split 'valid'"),
        ({"style": "word"}, "did you mean 'words'"),
        ({"test_share": 1.0}, "test_share must lie in"),
        ({"forms": ("iff",)}, "unknown form 'iff'"),
        ({"width": 1}, "width must lie in"),
        ({"depth": 9}, "depth must lie in"),
        ({"roles": ("knight", "knight")}, "neither of them part of the other"),
        ({"style": "compact", "roles": ("hero", "liar")}, "roles needs style 'words'"),
    ],
)
def test_impossible_settings_are_refused(change, reason):
    with pytest.raises(ConfigError, match=reason):
        KnightsSettings(**change)


def test_too_many_rows_for_the_space_are_refused():
    settings = KnightsSettings(people=(2, 3), count=2000, forms=("claim", "not"))
    with pytest.raises(ConfigError, match="puzzles with 2 people were requested, but only"):
        knights_rows(settings)


def test_a_hasty_teacher_is_wrong_as_often_as_haste_says_and_leaves_the_puzzles_alone():
    patient, hasty = (
        knights_rows(KnightsSettings(people=(3, 3), count=400, style="compact", haste=haste))
        for haste in (0.0, 0.4)
    )
    right = 0
    for before, after in zip(patient, hasty, strict=True):
        assert after.prompt == before.prompt
        assert after.fields["answer"] == before.fields["answer"]
        wanted, given = str(before.fields["response"]), str(after.fields["response"])
        thoughts, answer = given.removesuffix("</answer>").split("</think><answer>")
        assert wanted.startswith(thoughts)
        assert thoughts.rpartition("#")[2].startswith(answer), "it answers with its last try"
        right += given == wanted
        assert (answer == before.fields["answer"]) == (given == wanted)
        assert thoughts.endswith("+" if given == wanted else "-")
    # One to eight tries, alike: the mean of 0.6 to the power of the failed ones is 0.31.
    assert 0.24 < right / 400 < 0.40


def test_haste_needs_the_compact_style():
    with pytest.raises(ConfigError, match=r"needs style 'compact', got 0\.4"):
        KnightsSettings(haste=0.4)
