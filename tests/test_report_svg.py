from xml.etree import ElementTree

from sortedrl.report.axis import round_steps, short
from sortedrl.report.svg import SHADES, Canvas

NASTY = "a < b & \"c\" 'd' ]]> \x00\x1b é 長"


def test_text_titles_and_labels_are_escaped_and_stay_well_formed():
    canvas = Canvas(100, 50, label=NASTY)
    canvas.text(1, 2, content=NASTY, tail=NASTY)
    canvas.rect(0, 0, width=3, height=4, css="idle", title=NASTY)
    with canvas.group(title=NASTY):
        canvas.circle(1, 1, radius=2, css="plain")
    root = ElementTree.fromstring(canvas.svg())
    clean = NASTY.replace("\x00", "").replace("\x1b", "")
    assert root.attrib["aria-label"] == clean
    assert [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")] == [clean, clean]
    assert next(root.iter("{http://www.w3.org/2000/svg}text")).text == clean


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
