"""Charts: the canvas, axes, curves, bars and the Pareto front."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from report_worlds import NASTY, SHOWN
from sortedrl.report.charts.comparison import Point, bar_chart, pareto
from sortedrl.report.charts.curves import MAX_POINTS, Series, curves
from sortedrl.report.charts.svg import SHADES, Canvas, round_steps, series_class, short, stylesheet
from sortedrl.simulate.compare import row, simulate, variants
from sortedrl.simulate.settings import PRESETS

SVG = "{http://www.w3.org/2000/svg}"


def draw(*lines, **changes) -> ElementTree.Element:
    told = {"x_label": "answers", "y_label": "score", "title": "Scores"} | changes
    named = [Series(name=f"run {place}", points=tuple(line)) for place, line in enumerate(lines)]
    return ElementTree.fromstring(curves(named, **told))


def words(root, css=None):
    return [
        text.text for text in root.iter(f"{SVG}text") if css is None or text.get("class") == css
    ]


def dots(root, place=0):
    return [c for c in root.iter(f"{SVG}circle") if c.get("class") == f"series{place}"]


def titles(dots):
    return [dot.find(f"{SVG}title").text for dot in dots]


finite = st.floats(-1e6, 1e6, allow_subnormal=False)
places = st.floats(0, 1e6, allow_subnormal=False)
lines = st.lists(st.lists(st.tuples(places, finite), max_size=8).map(sorted), max_size=9)


@given(lines, st.booleans())
def test_whatever_the_values_everything_drawn_lies_on_the_sheet(lines, is_share):
    root = draw(*lines, is_share=is_share)
    width, height = float(root.get("width")), float(root.get("height"))
    circles = list(root.iter(f"{SVG}circle"))
    assert len(circles) == sum(len(line) for line in lines)
    for circle in circles:
        assert 0 <= float(circle.get("cx")) <= width
        assert 0 <= float(circle.get("cy")) <= height
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x")) <= width
        assert 0 <= float(text.get("y")) <= height


@given(lines.filter(any))
def test_zero_is_always_on_the_upright_axis(lines):
    root = draw(*lines)
    rules = [line for line in root.iter(f"{SVG}line") if line.get("class") == "axis"]
    assert len(rules) == 1
    assert "0" in words(root, "small")


@given(lines)
def test_labels_at_the_ends_of_lines_do_not_lie_over_each_other(lines):
    ends = [t for t in draw(*lines).iter(f"{SVG}text") if t.get("class") == "head"]
    spots = [(float(end.get("x")), float(end.get("y"))) for end in ends]
    for place, (x, y) in enumerate(spots):
        for other_x, other_y in spots[:place]:
            assert abs(x - other_x) >= 60 or abs(y - other_y) >= 13.9


def test_higher_values_lie_higher_and_later_places_further_right():
    first, second, third = dots(draw([(0, 0.25), (10, 0.5), (40, 1.0)]))
    assert float(first.get("cy")) > float(second.get("cy")) > float(third.get("cy"))
    step = float(second.get("cx")) - float(first.get("cx"))
    assert float(third.get("cx")) - float(second.get("cx")) == 3 * step


def test_shares_are_told_as_percentages_and_never_beyond_100():
    root = draw([(0, 0.62), (1536, 0.985)], is_share=True)
    assert titles(dots(root)) == ["run 0: score 62.0 % at 0", "run 0: score 98.5 % at 1,536"]
    assert words(root, "head") == ["98.5 %"]
    assert "100 %" in words(root)
    assert "120 %" not in words(root)
    full, plain = (dots(draw([(0, 1.0)], is_share=share))[0].get("cy") for share in (True, False))
    assert float(full) < float(plain)


def test_every_line_has_its_colour_a_name_in_the_key_and_its_last_value():
    root = draw([(0, 1.0), (1, 2.0)], [(0, 3.0), (1, 4.0)])
    paths = [path.get("class") for path in root.iter(f"{SVG}path")]
    assert sorted(paths) == ["series0 curve", "series1 curve"]
    assert sorted(words(root, "head")) == ["2", "4"]
    assert [word for word in words(root, "muted") if word.startswith("run")] == ["run 0", "run 1"]


def test_a_line_without_points_keeps_its_colour_and_is_named_as_empty():
    root = draw([], [(0, 3.0), (1, 4.0)])
    assert not dots(root, 0)
    assert len(dots(root, 1)) == 2
    assert "run 0 (none)" in words(root)


def test_no_values_at_all_are_a_picture_that_says_so():
    assert "no data yet" in words(draw([]))
    assert "no data yet" in words(draw())
    assert "no data yet" not in words(draw([(0, 0)]))


def test_whole_places_get_whole_marks():
    marks = words(draw([(0, 1.0), (3, 2.0)]), "small")
    assert {"0", "1", "2", "3"} <= set(marks)
    assert "2.5" not in marks[len(marks) - 4 :]
    assert "2.5" in words(draw([(0, 1.0), (2.75, 2.0)]), "small")


def test_a_long_line_is_drawn_through_means_of_neighbours():
    count = 10 * MAX_POINTS
    drawn = dots(draw([(float(x), float(x % 10)) for x in range(count)]))
    assert len(drawn) == MAX_POINTS
    assert titles(drawn)[0] == "run 0: score 4.5 (mean of 10) at 4.5"
    assert len({dot.get("cy") for dot in drawn}) == 1


def test_names_from_outside_are_text_and_cut_where_they_are_too_long():
    nasty = "<script>alert(1)</script> & " + "x" * 400
    picture = curves(
        [Series(name=nasty, points=((0, 1),))], x_label="<x>", y_label="&y", title='<t a="b">'
    )
    assert not re.search(r"<script|<x>|<t ", picture)
    root = ElementTree.fromstring(picture)
    shown = [word for word in words(root) if word.startswith("<script>")]
    assert len(shown) == 1
    assert len(shown[0]) < 130
    assert titles(dots(root)) == [f"{nasty}: &y 1 at 0"]


def test_where_lines_lie_on_each_other_the_first_shows():
    root = draw([(0, 1.0), (1, 1.0)], [(0, 1.0), (1, 1.0)])
    assert [path.get("class") for path in root.iter(f"{SVG}path")][-1] == "series0 curve"
    assert list(root.iter(f"{SVG}circle"))[-1].get("class") == "series0"


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_labels_give_way_into_the_plot_and_are_left_out_where_it_ends(value):
    root = draw(*[[(0, value)]] * 60, is_share=True)
    ends = [float(text.get("y")) for text in root.iter(f"{SVG}text") if text.get("class") == "head"]
    rules = [float(line.get("y1")) for line in root.iter(f"{SVG}line")]
    assert 15 < len(ends) < 20
    assert min(rules) - 18 < min(ends)
    assert max(ends) < float(root.get("height")) - 46


def test_many_names_wrap_into_rows_that_push_the_plot_down():
    few, many = draw([(0, 1.0)]), draw(*[[(0, 1.0)]] * 30)
    assert float(many.get("height")) > float(few.get("height"))
    swatches = [rect for rect in many.iter(f"{SVG}rect") if rect.get("height") == "10"]
    assert len({rect.get("y") for rect in swatches}) > 1
    plot = min(float(line.get("y1")) for line in many.iter(f"{SVG}line"))
    assert max(float(rect.get("y")) + 20 for rect in swatches) < plot
    assert all(float(rect.get("x")) < 800 for rect in swatches)


LABELS = {"x_label": "answers", "y_label": "score", "title": "Scores"}
stretches = st.tuples(finite, finite).map(sorted)
bands = st.lists(st.tuples(places, stretches).map(lambda s: (s[0], *s[1])), max_size=8).map(sorted)


def areas(root):
    return [p for p in root.iter(f"{SVG}path") if p.get("class", "").endswith(" band")]


@given(bands, st.lists(st.tuples(places, finite), max_size=3).map(sorted))
def test_a_band_lies_on_the_sheet_whatever_its_values(band, points):
    line = Series(name="run", points=tuple(points), band=tuple(band))
    root = ElementTree.fromstring(curves([line], **LABELS))
    width, height = float(root.get("width")), float(root.get("height"))
    for path in root.iter(f"{SVG}path"):
        for sign, place in re.findall(r"([MLHV ])(-?[\d.]+)", path.get("d")):
            assert 0 <= float(place) <= (width if sign in "MLH" else height)
    assert len(areas(root)) == (len(band) > 1)


def test_bands_lie_behind_all_lines_and_reach_from_the_least_to_the_most():
    first = Series(
        name="sorted",
        note="3 seeds",
        points=((0, 0.5), (10, 0.8)),
        band=((0, 0.4, 0.6), (10, 0.7, 1.0)),
    )
    second = replace(first, name="sync", note="", band=())
    root = ElementTree.fromstring(curves([first, second], **LABELS, is_share=True))
    classes = [path.get("class") for path in root.iter(f"{SVG}path")]
    assert classes == ["series0 band", "series1 curve", "series0 curve"]
    heights = [float(rule.get("y1")) for rule in root.iter(f"{SVG}line") if rule.get("x1") == "78"]
    floor, top = max(heights), min(heights)
    height = {share: floor - (floor - top) * share for share in (0.4, 0.6, 0.7, 1.0)}
    assert areas(root)[0].get("d") == (
        f"M78 {height[0.6]:g}L794 {height[1.0]:g}V{height[0.7]:g}L78 {height[0.4]:g}Z"
    )
    assert {"sorted (3 seeds)", "sync"} <= set(words(root, "muted"))
    assert titles(dots(root)) == [
        "sorted: score 50.0 % (40.0 % to 60.0 %) at 0",
        "sorted: score 80.0 % (70.0 % to 100.0 %) at 10",
    ]


def test_a_band_at_one_place_is_a_stretch():
    line = Series(name="run", points=((3, 0.5),), band=((3, 0.25, 0.75),))
    root = ElementTree.fromstring(curves([line], **LABELS))
    (stretch, _) = root.iter(f"{SVG}path")
    assert re.fullmatch(r"M794 [\d.]+V[\d.]+", stretch.get("d"))


def test_a_long_band_is_thinned_like_its_line():
    count = 4 * MAX_POINTS
    line = Series(
        name="run",
        points=tuple((float(x), 1.0) for x in range(count)),
        band=tuple((float(x), 0.5, 1.5 + x % 2) for x in range(count)),
    )
    (area,) = areas(ElementTree.fromstring(curves([line], **LABELS)))
    assert len(re.findall("[MLHV]", area.get("d"))) == 2 * MAX_POINTS


@pytest.mark.parametrize("scheme", ["auto", "light", "dark"])
def test_a_picture_that_stands_alone_has_a_colour_for_everything_it_draws(scheme):
    line = Series(name="run", points=((0, 1), (3, 0.5)), band=((0, 0.25, 1), (3, 0.25, 0.75)))
    root = ElementTree.fromstring(curves([line], **LABELS, scheme=scheme))
    style = root.find(f"{SVG}style").text
    used = {name for part in root.iter() for name in part.get("class", "").split()}
    assert {"series0", "curve", "band", "axis", "paper"} <= used
    for name in used - {"title"}:
        assert re.search(rf"\.{name}\b[^}}]*\{{[^}}]*(fill|stroke)", style), name
    assert ("@media" in style) == (scheme == "auto")
    assert not any(part.tag == f"{SVG}style" for part in draw([(0, 1)]).iter())


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
    assert [series_class(place) for place in (0, 5, 6, 7)] == [
        "series0",
        "series5",
        "series0",
        "series1",
    ]


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


POINTS = [
    Point(x=0.0, y=6500, label="coupled <0>", on_front=True),
    Point(x=0.9, y=9500, label="partial +1", on_front=True),
    Point(x=0.9, y=10_000, label="partial +2", on_front=True, is_best=True),
    Point(x=3.0, y=8000, label="beaten"),
]


def draw_pareto(points, **changes) -> ElementTree.Element:
    told = {"x_label": "staleness", "y_label": "tokens & time"} | changes
    return ElementTree.fromstring(pareto(points, **told))


def test_front_points_are_numbered_and_named_in_the_key_and_others_in_tooltips():
    root = draw_pareto(POINTS)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert [texts.count(number) for number in ("1", "2", "3")] >= [2, 2, 2]
    assert "coupled <0>" in texts
    assert "beaten" not in texts
    assert any(title.text.startswith("beaten: ") for title in root.iter(f"{SVG}title"))


def test_the_best_is_ringed():
    rings = [c for c in draw_pareto(POINTS).iter(f"{SVG}circle") if c.get("class") == "ring"]
    assert len(rings) == 1


values = st.floats(0, 1e6, allow_subnormal=False)


@given(st.lists(st.builds(Point, x=values, y=values, label=st.text(), on_front=st.booleans())))
def test_any_points_give_a_picture_with_every_dot_inside(points):
    if not points:
        with pytest.raises(ValueError, match="at least one point"):
            draw_pareto(points)
        return
    for is_cropped in (False, True):
        root = draw_pareto(points, is_cropped=is_cropped, names_all=is_cropped)
        for dot in root.iter(f"{SVG}circle"):
            assert 0 <= float(dot.get("cx", -1)) <= 860
            assert 0 <= float(dot.get("cy", -1)) <= float(root.attrib["height"])


def test_all_points_are_named_where_asked_the_beaten_ones_in_a_quiet_voice():
    root = draw_pareto(POINTS, names_all=True)
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
    assert marks(draw_pareto(far))[0] == "0"
    assert marks(draw_pareto(near, is_cropped=True))[0] == "0"
    assert marks(draw_pareto(far, is_cropped=True)) == ["80", "85", "90"]


def test_a_fixed_scheme_asks_for_no_theme():
    assert "@media" not in pareto(POINTS, x_label="x", y_label="y", scheme="light")
