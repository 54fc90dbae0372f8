from dataclasses import replace
from xml.etree import ElementTree

import pytest

from sortedrl.compare import row, simulate, variants
from sortedrl.report.charts.comparison import bar_chart
from sortedrl.simulate.presets import PRESETS

TEXT = "{http://www.w3.org/2000/svg}text"


@pytest.fixture(scope="module")
def outcomes():
    picture = PRESETS["picture"]()
    return [
        simulate(replace(picture, schedule=schedule)) for schedule in variants(picture.schedule)
    ]


def test_every_row_has_its_name_and_its_four_values(outcomes):
    rows = [row(outcome, sync=outcomes[0]) for outcome in outcomes]
    texts = [text.text for text in ElementTree.fromstring(bar_chart(rows)).iter(TEXT)]
    for outcome, values in zip(outcomes, rows, strict=True):
        assert outcome.name in texts
        assert f"{100 * values['bubble']:.1f} %" in texts
        assert f"{values['length_bias']:.2f}" in texts
        assert f"{values['early_length_bias']:.2f}" in texts
    assert len(texts) == 5 * len(rows) + 8


def test_without_a_baseline_goodput_is_in_tokens_per_second(outcomes):
    svg = bar_chart([row(outcome) for outcome in outcomes])
    assert "goodput, tokens/s" in svg
    assert "times sync" not in svg


def test_one_row_is_enough_and_none_is_refused(outcomes):
    ElementTree.fromstring(bar_chart([row(outcomes[0], sync=outcomes[0])]))
    with pytest.raises(ValueError, match="at least one row"):
        bar_chart([])


def test_names_are_escaped(outcomes):
    svg = bar_chart([row(outcomes[0], sync=outcomes[0]) | {"name": "a<b&c"}])
    assert "a&lt;b&amp;c" in svg


def test_a_value_that_is_no_number_is_refused(outcomes):
    with pytest.raises(TypeError, match="bubble must be a number"):
        bar_chart([row(outcomes[0]) | {"bubble": None}])
