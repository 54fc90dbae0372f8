from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.report.pareto import Point, pareto

SVG = "{http://www.w3.org/2000/svg}"
POINTS = [
    Point(x=0.0, y=6500, label="coupled <0>", on_front=True),
    Point(x=0.9, y=9500, label="partial +1", on_front=True),
    Point(x=0.9, y=10_000, label="partial +2", on_front=True, is_best=True),
    Point(x=3.0, y=8000, label="beaten"),
]


def draw(points) -> ElementTree.Element:
    return ElementTree.fromstring(pareto(points, x_label="staleness", y_label="tokens & time"))


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
    root = draw(points)
    for dot in root.iter(f"{SVG}circle"):
        assert 0 <= float(dot.get("cx", -1)) <= 860
        assert 0 <= float(dot.get("cy", -1)) <= float(root.attrib["height"])
