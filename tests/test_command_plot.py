import json
import re
import struct
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from sortedrl.cli import plot
from sortedrl.cli import plot as pictures
from sortedrl.core.events import EventFile, Score, Scored, Start, Update, read_events
from sortedrl.errors import ConfigError, DataError
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.settings import PRESETS

SVG = "{http://www.w3.org/2000/svg}"
SIX = PRESETS["picture"]()


def write_run(folder, *, strategy="sorted", seed=0, scores=(), has_rewards=False):
    """A simulated run with the files of a real one."""
    folder.mkdir(parents=True)
    schedule = replace(SIX.schedule, strategy=strategy, mode="on_policy", lookahead=0)
    file = EventFile(folder / "events.jsonl")

    def record(event):
        if has_rewards and isinstance(event, Update):
            scored = tuple(Scored(t.prompt, t.sample, 0.5, None, None, None) for t in event.trained)
            file(Score(seconds=event.seconds, round=event.round, waited_seconds=0, scored=scored))
        file(event)

    simulate(replace(SIX, schedule=schedule, seed=seed), record=record)
    file.close()
    if scores:
        rows = [
            {
                "update": place,
                "total/samples": 10 * place,
                "total/trained_tokens": 1000 * place,
                "total/seconds": 2.5 * place,
                "evaluation/score": score,
            }
            for place, score in enumerate(scores)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "metrics.jsonl").write_text(lines)
        (folder / "config.toml").write_text(f'seed = {seed}\n[schedule]\nstrategy = "{strategy}"\n')
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two strategies with two seeds each."""
    home = tmp_path_factory.mktemp("runs")
    return [
        write_run(home / f"seed{seed}" / name, strategy=name, seed=seed, scores=(0.25, score))
        for seed in (0, 1)
        for name, score in (("sync", 0.5 + 0.2 * seed), ("sorted", 0.75))
    ]


def draw(out, kind, *words) -> ElementTree.Element:
    plot.run([kind, *map(str, words), "--out", str(out)])
    return ElementTree.fromstring(out.read_text())


def words(root, css=None):
    return [
        text.text for text in root.iter(f"{SVG}text") if css is None or text.get("class") == css
    ]


@pytest.mark.parametrize("kind", ["slots", "bubble", "learning", "lengths", "pareto"])
@pytest.mark.parametrize("scheme", ["auto", "light", "dark"])
def test_every_kind_is_a_picture_that_stands_alone(kind, scheme, runs, tmp_path, capsys):
    root = draw(tmp_path / "p.svg", kind, *runs, "--scheme", scheme, "--title", "Mine & yours")
    assert "Mine & yours" in words(root, "title")
    style = root.find(f"{SVG}style").text
    assert ("@media" in style) == (scheme == "auto")
    for name in {n for part in root.iter() for n in part.get("class", "").split()} - {"title"}:
        assert re.search(rf"\.{name}\b", style), name
    assert capsys.readouterr().err == f"wrote {tmp_path / 'p.svg'}\n"


def test_slots_have_a_panel_for_each_run_named_as_short_as_tells_them_apart(runs, tmp_path):
    root = draw(tmp_path / "p.svg", "slots", *runs)
    assert words(root, "title") == ["seed0/sync", "seed0/sorted", "seed1/sync", "seed1/sorted"]
    root = draw(tmp_path / "p.svg", "slots", runs[0], runs[1] / "events.jsonl")
    assert words(root, "title") == ["sync", "sorted"]


def test_slots_of_the_first_groups_and_of_a_window_are_a_part_of_the_run(runs, tmp_path):
    whole, groups, window = (
        draw(tmp_path / "p.svg", "slots", runs[0], *flags)
        for flags in ((), ("--groups", "1"), ("--seconds", "100", "200"))
    )
    bars = [len(list(root.iter(f"{SVG}g"))) for root in (whole, groups, window)]
    assert 0 < bars[1] < bars[0] > bars[2] > 0
    log = list(read_events(runs[0] / "events.jsonl"))
    done = next(event.seconds for event in log if isinstance(event, Update) and event.closed)
    starts = [event for event in log if isinstance(event, Start) and event.seconds < done]
    assert bars[1] == len(starts)
    assert "100 s" in words(window, "small")
    tails = [tail.text for tail in window.iter(f"{SVG}tspan")]
    assert all(tail.endswith("in the whole run") for tail in tails)


def test_seeds_are_one_line_with_a_band_that_the_key_names(runs, tmp_path):
    root = draw(tmp_path / "p.svg", "learning", *runs)
    named = [word for word in words(root, "muted") if "seeds" in word]
    assert named == [
        "sync (mean of 2 seeds, band: minimum to maximum)",
        "sorted (mean of 2 seeds, band: minimum to maximum)",
    ]
    assert sorted(words(root, "head")) == ["60.0 %", "75.0 %"]
    paths = [path.get("class") for path in root.iter(f"{SVG}path")]
    assert paths.count("series0 band") == paths.count("series1 band") == 1


@pytest.mark.parametrize(
    ("by", "label", "last"), [("answers", "answers", 10), ("tokens", "tokens", 1000)]
)
def test_learning_is_drawn_against_what_is_asked_for(by, label, last, runs, tmp_path):
    root = draw(tmp_path / "p.svg", "learning", runs[0], "--by", by)
    assert f"{label} trained on" in words(root, "muted")
    tips = [tip.text for tip in root.iter(f"{SVG}title")]
    assert f"sync: accuracy 50.0 % at {last:,}" in tips


def test_learning_by_seconds_is_in_seconds_of_training(runs, tmp_path):
    root = draw(tmp_path / "p.svg", "learning", runs[0], "--by", "seconds")
    assert "sync: accuracy 50.0 % at 2.5" in [t.text for t in root.iter(f"{SVG}title")]


def test_bubble_has_a_dot_for_each_round_or_each_group(runs, tmp_path):
    log = (runs[1] / "events.jsonl").read_text()
    rounds, groups = log.count('"event":"harvest"'), log.count('"event":"load"')
    for flags, count in (((), rounds), (("--per", "group"), groups)):
        root = draw(tmp_path / "p.svg", "bubble", runs[1], *flags)
        assert len(list(root.iter(f"{SVG}circle"))) == count
    assert rounds != groups


def test_rewards_come_from_the_events_where_there_are_no_numbers(tmp_path):
    folder = write_run(tmp_path / "run", has_rewards=True)
    root = draw(tmp_path / "p.svg", "rewards", folder)
    updates = (folder / "events.jsonl").read_text().count('"event":"update"')
    assert len(list(root.iter(f"{SVG}circle"))) == updates
    assert words(root, "head") == ["0.5"]


def test_pareto_sets_score_against_seconds_or_speed_against_staleness(runs, tmp_path):
    scored = words(draw(tmp_path / "p.svg", "pareto", *runs))
    assert "final accuracy, %" in scored
    assert {"seed0/sync", "seed1/sync"} <= set(scored)
    bare = write_run(tmp_path / "bare")
    assert "trained tokens per second" in words(draw(tmp_path / "p.svg", "pareto", *runs, bare))


def test_what_no_run_beats_is_on_the_front(runs, tmp_path):
    root = draw(tmp_path / "p.svg", "pareto", *runs)
    dots = [dot.get("class") for dot in root.iter(f"{SVG}circle")]
    # sorted is faster and better than sync, with either seed
    assert dots.count("plain") in (1, 2)
    assert dots.count("plain") + dots.count("faint") == 4
    loud = [word for word in words(root, "ink") if word.startswith("seed")]
    assert all("sorted" in word for word in loud)


def size(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_a_png_has_the_width_asked_for_and_one_scheme(runs, tmp_path):
    pytest.importorskip("resvg_py")
    sizes, contents = {}, {}
    for name, flags in (
        ("plain", ()),
        ("light", ("--scheme", "light")),
        ("dark", ("--scheme", "dark")),
        ("narrow", ("--width", "430")),
    ):
        out = tmp_path / f"{name}.png"
        plot.run(["learning", *map(str, runs), "--out", str(out), *flags])
        contents[name] = out.read_bytes()
        sizes[name] = size(contents[name])
    assert sizes["plain"][0] == 1720
    assert sizes["narrow"] == (430, round(sizes["plain"][1] / 4))
    assert contents["plain"] == contents["light"] != contents["dark"]


def test_a_png_shows_its_words(runs, tmp_path):
    pytest.importorskip("resvg_py")
    svg = draw(tmp_path / "p.svg", "learning", *runs, "--scheme", "light")
    silent = ElementTree.tostring(svg, encoding="unicode")
    text = re.sub(r"<(ns0:)?text.*?</(ns0:)?text>", "", silent)
    assert text != silent
    assert pictures.png(silent, width=430) != pictures.png(text, width=430)


def test_without_the_package_a_png_says_how_to_get_it(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(ConfigError, match=r"pip install 'sortedrl\[plot\]'"):
        plot.run(["slots", str(runs[0]), "--out", str(tmp_path / "p.png")])
    assert not list(tmp_path.iterdir())


class Fonts:
    """A renderer that knows some fonts, and uses one of them for all others if it has one."""

    def __init__(self, *known: str, otherwise: str = "") -> None:
        self.known, self.otherwise = known, otherwise

    def svg_to_bytes(self, *, svg_string, sans_serif_family="", font_family="", width=0):
        if "<text" not in svg_string:
            return b""
        known = sans_serif_family in self.known
        return (sans_serif_family if known else self.otherwise).encode()


def test_the_first_font_that_is_there_is_used(monkeypatch):
    svg = "<svg><text/></svg>"
    for fonts, used in (
        (Fonts("DejaVu Sans", "Liberation Sans"), b"Liberation Sans"),
        (Fonts("DejaVu Sans", otherwise="Some Serif"), b"DejaVu Sans"),
        (Fonts(otherwise="Some Serif"), b"Some Serif"),
    ):
        monkeypatch.setitem(sys.modules, "resvg_py", fonts)
        assert pictures.png(svg, width=10) == used


def test_where_no_text_can_be_drawn_a_png_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", Fonts())
    with pytest.raises(ConfigError, match="needs a font for its text"):
        pictures.png("<svg/>", width=10)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("slots", "RUN", "--out", "p.pdf"), "must end in .svg or .png, got 'p.pdf'"),
        (("slots", "--out", "p.svg"), "at least one run must be given"),
        (("slots", "RUN", "--out", "p.svg", "--width", "9"), "--width is for .png"),
        (("slots", "RUN", "--out", "p.png", "--width", "0"), "must lie in 1..20000 pixels, got 0"),
        (("slots", "RUN", "--out", "p.svg", "--groups", "0"), "at least 1, got 0"),
        (("slots", "RUN", "--out", "p.svg", "--seconds", "9", "3"), "got 9.0 3.0"),
        (
            ("slots", "RUN", "--out", "p.svg", "--seconds", "1e5", "2e5"),
            "before the end of the runs",
        ),
        (
            ("slots", "RUN", "--out", "p.svg", "--seconds", "1", "3", "--groups", "1"),
            "not both",
        ),
        (("bubble", "RUN", "--out", "p.svg", "--by", "tokens"), "--by is for learning"),
        (("pareto", "RUN", "--out", "p.svg", "--per", "group"), "--per is for bubble"),
        (("learning", "RUN", "--out", "p.svg", "--groups", "2"), "--groups is for slots"),
        (("learning", "BARE", "--out", "p.svg"), "none of these has any"),
        (("rewards", "BARE", "--out", "p.svg"), "simulated runs have none"),
    ],
)
def test_what_cannot_be_drawn_is_refused(flags, words, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = {"RUN": str(runs[0]), "BARE": str(runs[0] / "events.jsonl")}
    with pytest.raises(ConfigError, match=re.escape(words)):
        plot.run([places.get(word, word) for word in flags])
    assert not list(tmp_path.iterdir())


def test_a_picture_that_cannot_be_written_is_told(runs, tmp_path):
    for name in ("p.svg", "p.png"):
        with pytest.raises(DataError, match="cannot be written"):
            plot.run(["slots", str(runs[0]), "--out", str(tmp_path / "missing" / name)])
