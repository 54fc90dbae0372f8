from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.report.charts.comparison import Point, pareto

SVG = "{http://www.w3.org/2000/svg}"
POINTS = [
    Point(x=0.0, y=6500, label="coupled <0>", on_front=True),
    Point(x=0.9, y=9500, label="partial +1", on_front=True),
    Point(x=0.9, y=10_000, label="partial +2", on_front=True, is_best=True),
    Point(x=3.0, y=8000, label="beaten"),
]


def draw(points, **changes) -> ElementTree.Element:
    told = {"x_label": "staleness", "y_label": "tokens & time"} | changes
    return ElementTree.fromstring(pareto(points, **told))


def test_front_points_are_numbered_and_named_in_the_key_and_others_in_tooltips():
    root = draw(POINTS)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert [texts.count(number) for number in ("1", "2", "3")] >= [2, 2, 2]
    assert "coupled <0>" in texts
    assert "beaten" not in texts
    assert any(title.text.startswith("beaten: ") for title in root.iter(f"{SVG}title"))


def test_the_best_is_ringed():
    rings = [c for c in draw(POINTS).iter(f"{SVG}circle") if c.get("class") == "ring"]
    assert len(rings) == 1


values = st.floats(0, 1e6, allow_subnormal=False)


@given(st.lists(st.builds(Point, x=values, y=values, label=st.text(), on_front=st.booleans())))
def test_any_points_give_a_picture_with_every_dot_inside(points):
    if not points:
        with pytest.raises(ValueError, match="at least one point"):
            draw(points)
        return
    for is_cropped in (False, True):
        root = draw(points, is_cropped=is_cropped, names_all=is_cropped)
        for dot in root.iter(f"{SVG}circle"):
            assert 0 <= float(dot.get("cx", -1)) <= 860
            assert 0 <= float(dot.get("cy", -1)) <= float(root.attrib["height"])


def test_all_points_are_named_where_asked_the_beaten_ones_in_a_quiet_voice():
    root = draw(POINTS, names_all=True)
    voices = {text.text: text.get("class") for text in root.iter(f"{SVG}text")}
    assert voices["beaten"] == "muted"
    assert voices["partial +1"] == "ink"
    assert voices["partial +2"] == "best"
    assert "least costly first" in voices


def marks(root):
    """The numbers on the upright axis."""
    texts = [t for t in root.iter(f"{SVG}text") if t.get("class") == "small"]
    return [t.text for t in texts if t.get("x") == "70"]


def test_axes_begin_at_0_unless_cropped_and_far_from_it():
    far = [Point(x=50, y=80, label="a"), Point(x=60, y=90, label="b")]
    near = [Point(x=5, y=8, label="a"), Point(x=60, y=90, label="b")]
    assert marks(draw(far))[0] == "0"
    assert marks(draw(near, is_cropped=True))[0] == "0"
    assert marks(draw(far, is_cropped=True)) == ["80", "85", "90"]


def test_a_fixed_scheme_asks_for_no_theme():
    assert "@media" not in pareto(POINTS, x_label="x", y_label="y", scheme="light")
