"""Small runs to draw, and what a reader makes of the drawings."""

import json
import math
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from xml.etree import ElementTree

from hypothesis import strategies as st

from sortedrl.config.schedule import Schedule
from sortedrl.report.record import RunRecord, measured
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.settings import PRESETS

NASTY = (
    "</style></script><script>window.hacked = 1</script><!-- <img src=x onerror='window.hacked=2'> "
    "]]> & \"q\" 'a' é 長 \x00\x1b\u200b\u2028\ud800\u202edrow"
)
"""What may come from outside and must show as text."""
SHOWN = re.sub(
    "[\x00\x1b\u200b\u2028\ud800\u202e]", lambda sign: f"\u2039U+{ord(sign[0]):04X}\u203a", NASTY
)
"""That text as a reader sees it."""
MARKUP = (
    *("[easy]", "[/]", "[/nope]", "[bold]x[/bold]", "[link=http://a]b[/link]", "[#ff0000]c", ":x:"),
    *("\\[d]", "{task.description}", "%s", "[@click=e]", "[[", "]"),
)
"""Words that a terminal, or what formats text for one, could take for more than words."""
SVG = "{http://www.w3.org/2000/svg}"

_BASE = Schedule(group_prompts=8, samples_per_prompt=2, update_batch=5)
SCHEDULES = {
    "sync": replace(_BASE, strategy="sync"),
    "on_policy": replace(_BASE, mode="on_policy"),
    "partial": replace(_BASE, mode="partial"),
    "coupled": replace(_BASE, mode="coupled"),
    "lookahead": replace(_BASE, mode="coupled", lookahead=1),
    "ungrouped": replace(_BASE, strategy="ungrouped", mode="partial"),
    "prompts": replace(_BASE, mode="on_policy", harvest_unit="prompt"),
}


@cache
def log(schedule, *, groups=3, seed=0):
    """The events of a small run with costs that take time."""
    paper = PRESETS["paper"]()
    events = []
    simulate(
        replace(
            paper,
            groups=groups,
            seed=seed,
            schedule=SCHEDULES[schedule],
            engine=replace(paper.engine, slots=6, max_tokens=400),
            lengths=replace(paper.lengths, median=80),
        ),
        record=events.append,
    )
    return tuple(events)


@cache
def run_of(schedule, *, name="run", share=1.0, groups=3, seed=0):
    """The run, or its first part as if the log were cut off there."""
    events = log(schedule, groups=groups, seed=seed)
    events = events[: max(1, math.ceil(share * len(events)))]
    return measured(RunRecord(name=name, events=events))


whole_runs = st.builds(run_of, st.sampled_from(sorted(SCHEDULES)), seed=st.integers(0, 2))
any_runs = st.builds(
    run_of,
    st.sampled_from(sorted(SCHEDULES)),
    share=st.one_of(st.just(1.0), st.floats(0, 1)),
    seed=st.integers(0, 2),
)


class Reader(HTMLParser):
    """What a browser would make of a page: its elements, their attributes and their own text."""

    def __init__(self, text):
        super().__init__()
        self.text = text
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[tuple[str, int]] = []
        self._texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._texts.append((tag, ""))
        if tag not in ("meta", "input"):
            self._open.append((tag, len(self._texts) - 1))

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        if self._open:
            tag, place = self._open[-1]
            self._texts[place] = (tag, self._texts[place][1] + data)

    def texts(self, tag):
        """The text of each element of a kind, without that of the elements in it."""
        return [text for kind, text in self._texts if kind == tag]

    def attributes(self, name):
        return [attrs[name] for _, attrs in self.tags if name in attrs]

    def kinds(self):
        return {tag for tag, _ in self.tags}

    def data(self):
        """The data of a page that has one element of it."""
        given, _ = self.texts("script")
        return json.loads(given)

    def table(self):
        """The cells of each row of the numbers of a page of runs, under its name."""
        section = re.search(r'<section id="numbers">.*?</section>', self.text, re.DOTALL).group()
        found = Reader(section)
        runs = found.attributes("scope").count("col") - 1
        cells = iter(found.texts("td"))
        return {name: [next(cells) for _ in range(runs)] for name in found.texts("th")[runs + 1 :]}


def tree(html):
    """The elements of a part of a page; it must be well-formed XML."""
    return ElementTree.fromstring(f"<main>{html}</main>")


def words(html):
    """All text of a part of a page but that of its pictures, with plain spaces."""
    parts = [element for element in tree(html).iter() if element.tag in ("p", "figcaption", "td")]
    return [" ".join("".join(part.itertext()).split()) for part in parts]


def drawn(html, shape, *, css=None):
    """The shapes of one kind in the pictures of a part, each with its tooltip.

    Of a picture that a phone gets in another width, only the wide one counts.
    """
    part = tree(html)
    for figure in part.iter("figure"):
        for narrow in figure.findall("div[@class='at-narrow']"):
            figure.remove(narrow)
    parents = {child: parent for parent in part.iter() for child in parent}
    return [
        (element, tooltip(element, parents))
        for element in parents
        if element.tag == SVG + shape and css in (None, *element.get("class", "").split())
    ]


def tooltip(element, parents):
    """What shows when a shape is pointed at."""
    while element is not None:
        title = element.find(f"{SVG}title")
        if title is not None:
            return title.text
        element = parents.get(element)
    return None


def size(element, side):
    """A number of a shape."""
    return float(element.get(side))


def check_pictures(html):
    """Every shape lies inside its picture, at finite places, with the classes of the page only."""
    for picture in tree(html).iter(f"{SVG}svg"):
        width, height = size(picture, "width"), size(picture, "height")
        for element in picture.iter():
            assert not {"style", "fill", "stroke"} & set(element.attrib)
            assert not any(name.startswith("on") for name in element.attrib)
            for x, y in corners(element):
                assert -0.01 <= x <= width + 0.01, ElementTree.tostring(element)
                assert -0.01 <= y <= height + 0.01, ElementTree.tostring(element)


def corners(element):
    """Places that a shape touches."""
    kind = element.tag.removeprefix(SVG)
    if kind == "rect" and element.get("x") is not None:
        x, y = size(element, "x"), size(element, "y")
        width, height = size(element, "width"), size(element, "height")
        assert width >= 0
        assert height >= 0
        return [(x, y), (x + width, y + height)]
    if kind == "circle":
        return [(size(element, "cx"), size(element, "cy"))]
    if kind == "text":
        return [(size(element, "x"), size(element, "y"))]
    if kind == "line":
        return [(size(element, f"x{end}"), size(element, f"y{end}")) for end in (1, 2)]
    if kind == "path":
        return path_points(element)
    return []


def path_points(element):
    """The corners of a path of straight lines."""
    points = []
    for step, numbers in re.findall(r"([MLHV])([-\d. ]+)", element.get("d")):
        values = [float(value) for value in numbers.split()]
        if step == "H":
            values = [values[0], points[-1][1]]
        elif step == "V":
            values = [points[-1][0], values[0]]
        points.append(tuple(values))
    assert re.fullmatch(r"([MLHV][-\d. ]+)+Z?", element.get("d"))
    return points
