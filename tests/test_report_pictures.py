"""What holds for every part of the page that is drawn from the numbers of a run."""

from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from report_worlds import NASTY, SCHEDULES, any_runs, check_pictures, run_of, tree, words
from sortedrl.report.html import remarks
from sortedrl.report.sections import lengths, slots, tokens

SECTIONS = [
    slots.bubbles_section,
    tokens.ledger_section,
    lengths.lengths_section,
    tokens.staleness_section,
]
each_section = pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.__name__)


@each_section
@settings(max_examples=60)
@given(runs=st.lists(any_runs, min_size=1, max_size=4))
def test_pictures_of_any_runs_cut_off_anywhere_are_whole_and_stay_inside(section, runs):
    check_pictures(section(runs))


@each_section
def test_a_log_that_has_only_begun_is_no_error(section):
    begun = run_of("sync", share=0.0)
    assert len(begun.record.events) == 1
    check_pictures(section([begun]))
    check_pictures(section([begun, run_of("partial")]))


@each_section
def test_everything_from_outside_is_shown_as_text(section):
    runs = [run_of("partial", name=NASTY), run_of("on_policy", name="other")]
    page = section(runs)
    check_pictures(page)
    tags = {element.tag.rpartition("}")[2] for element in tree(page).iter()}
    assert not tags & {"script", "img", "style"}
    assert NASTY.split("\x00")[0].strip() in "".join(tree(page).itertext())


@each_section
def test_twelve_runs_fit(section):
    runs = [run_of(name, name=f"run {name} {seed}") for seed in range(2) for name in SCHEDULES]
    page = section(runs[:12])
    check_pictures(page)
    assert len(page) < 500_000
    for run in runs[:12]:
        assert run.name in ElementTree.tostring(tree(page), encoding="unicode")


@each_section
def test_a_long_name_is_cut_and_shows_whole_when_pointed_at(section):
    name = "a very long name " * 40
    page = section([run_of("partial", name=name), run_of("ungrouped", name="other")])
    heads = [e.text for e in tree(page).iter() if e.get("class") == "head" and e.text]
    cut = [text for text in heads if text.endswith("\N{HORIZONTAL ELLIPSIS}")]
    assert cut
    assert all(name.startswith(text[:-1]) and len(text) < 120 for text in cut)
    assert any(name in (e.text or "") for e in tree(page).iter() if e.tag.endswith("}title"))


@each_section
def test_no_text_of_a_picture_is_smaller_than_11_pixels(section):
    page = section([run_of("partial"), run_of("on_policy")])
    known = {"ink", "head", "small", "muted", "title"}
    texts = [e for e in tree(page).iter() if e.tag.endswith("}text")]
    assert texts
    assert {text.get("class") for text in texts} <= known


def test_the_same_is_said_once_for_all_runs_of_which_it_is_true():
    said = [("a", "it is so."), ("b", "it is not."), ("c", "it is so."), ("<d>", "it is so.")]
    assert words(remarks(said, are_named=True)) == ["a, c and <d>: it is so.", "b: it is not."]
    assert words(remarks([("a", "it is so.")], are_named=True)) == ["a: it is so."]
    assert words(remarks([("a", "it is so.")], are_named=False)) == ["It is so."]
    assert remarks([], are_named=True) == ""
