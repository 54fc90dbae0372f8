import re
from xml.etree import ElementTree

from report_worlds import NASTY, SHOWN
from sortedrl.report.charts.axes import round_steps, short
from sortedrl.report.charts.svg import SHADES, Canvas, series, stylesheet


def test_text_titles_and_labels_are_escaped_and_stay_well_formed():
    canvas = Canvas(100, 50, label=NASTY)
    canvas.text(1, 2, content=NASTY, tail=NASTY)
    canvas.rect(0, 0, width=3, height=4, css="idle", title=NASTY)
    with canvas.group(title=NASTY):
        canvas.circle(1, 1, radius=2, css="plain")
    root = ElementTree.fromstring(canvas.svg())
    assert root.attrib["aria-label"] == SHOWN
    assert [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")] == [SHOWN, SHOWN]
    assert next(root.iter("{http://www.w3.org/2000/svg}text")).text == SHOWN


def test_a_path_writes_short_steps():
    canvas = Canvas(10, 10, label="")
    canvas.path([(0, 1), (2.0, 1), (2, 3.25), (4, 5)], css="front", is_closed=True)
    assert 'd="M0 1H2V3.25L4 5Z"' in canvas.svg()


def test_every_shade_has_a_colour_by_day_and_by_night():
    day, night = Canvas(1, 1, label="").svg().split("prefers-color-scheme:dark")
    for step in range(SHADES):
        assert f".shade{step}{{" in day
        assert f".shade{step}{{" in night


def test_axis_numbers_are_round_and_end_inside():
    for end in (0.013, 0.9, 7, 18, 2475, 1e6):
        steps = round_steps(end, count=6)
        assert steps[0] == 0
        assert 4 <= len(steps) <= 8
        assert steps[-1] <= end
    assert round_steps(0, count=5) == [0]
    assert short(1234567) == "1,234,567"


def with_line(**changes) -> str:
    canvas = Canvas(10, 10, label="")
    canvas.path([(0, 1), (2, 3)], css="series0 curve")
    return canvas.svg(**changes)


def test_a_fixed_scheme_has_the_colours_of_that_scheme_only():
    light, dark = (with_line(scheme=scheme) for scheme in ("light", "dark"))
    assert "@media" not in light + dark
    for name in ("paper", "ink", "shade0", "series0", "series5"):
        rule = re.compile(rf"\.{name}\{{fill:(#\w+)")
        day, night = rule.findall(light), rule.findall(dark)
        assert len(day) == len(night) == 1
        assert day != night
        assert rule.findall(with_line()) == [*day, *night]


def test_rules_for_lines_are_there_only_where_a_picture_has_lines():
    assert ".series0.curve{stroke:" in with_line()
    plain = Canvas(10, 10, label="").svg()
    assert ".series" not in plain
    assert ".curve" not in plain
    assert ".series0" in stylesheet()
    axis = Canvas(10, 10, label="")
    axis.line(0, 0, x2=1, y2=1, css="axis")
    assert ".axis{stroke:" in axis.svg()


def test_a_word_in_a_tooltip_is_no_class():
    canvas = Canvas(10, 10, label='class="series0"')
    canvas.rect(0, 0, width=1, height=1, css="idle", title='class="hatched" class="series0"')
    assert ".series0" not in canvas.svg()
    assert "<defs>" not in canvas.inline()


def test_a_picture_in_a_page_has_no_style_and_brings_its_hatch_where_it_needs_one():
    canvas = Canvas(10, 10, label="")
    canvas.rect(0, 0, width=1, height=1, css="idle")
    assert "<style" not in canvas.inline()
    assert "<defs>" not in canvas.inline()
    canvas.rect(0, 0, width=1, height=1, css="hatched")
    assert "<style" not in canvas.inline()
    assert 'id="hatch"' in canvas.inline()


def test_no_text_is_smaller_than_eleven_pixels():
    sizes = [float(size) for size in re.findall(r"font(?:-size)?:([\d.]+)px", stylesheet())]
    assert len(sizes) >= 4
    assert min(sizes) >= 11


def test_series_have_six_colours_and_then_come_again():
    assert [series(place) for place in (0, 5, 6, 7)] == ["series0", "series5", "series0", "series1"]
