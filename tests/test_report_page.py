"""The page of runs: what it says, its numbers and its settings."""

import base64
import hashlib
import json
import re
from dataclasses import asdict, astuple, replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from report_worlds import NASTY, SHOWN, Reader, any_runs, log, run_of
from sortedrl.core.events import Begin, End, SyncWeights, Update, to_json
from sortedrl.core.meter import measure
from sortedrl.errors import DataError
from sortedrl.report.advice.diagnosis import diagnose
from sortedrl.report.advice.simulation import seconds_spent
from sortedrl.report.charts.timeline import MAX_BARS
from sortedrl.report.html import asset
from sortedrl.report.page import (
    SCRIPTS,
    advice_section,
    numbers_section,
    runs_page,
    settings_section,
)
from sortedrl.report.record import RunRecord, measured, read_run
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.settings import PRESETS


@cache
def events_of(strategy, mode="on_policy", preset="picture"):
    simulation = PRESETS[preset]()
    schedule = replace(simulation.schedule, strategy=strategy, mode=mode)
    events = []
    simulate(replace(simulation, schedule=schedule), record=events.append)
    return tuple(events)


def rows_of(events, scores):
    """Metrics as a run writes them: a row for each update, evaluations spread evenly."""
    rows = [{"update": 0, "evaluation/score": scores[0]}] if scores else []
    updates = [event for event in events if isinstance(event, Update)]
    due = {
        round(place * len(updates) / (len(scores) - 1)): score
        for place, score in enumerate(scores)
        if place
    }
    samples = 0
    for number, update in enumerate(updates, start=1):
        samples += len(update.trained)
        tokens = sum(trained.tokens for trained in update.trained)
        rows.append(
            {
                "update": number,
                "total/seconds": update.seconds,
                "total/samples": samples,
                "reward/mean": number / len(updates) - 0.5,
                "length/mean": tokens / len(update.trained),
            }
        )
        if number in due:
            rows.append({"update": number, "evaluation/score": due[number]})
    return rows


def record(name, *, scores=(0.25, 0.5, 0.75), strategy="sorted", mode="partial", **changes):
    events = events_of(strategy, mode, **changes)
    return RunRecord(name=name, events=events, rows=rows_of(events, scores))


def pair():
    return [record("ours"), record("base", scores=(0.25, 0.6), strategy="sync", mode="on_policy")]


def read(runs, title="Two runs"):
    return Reader(runs_page(runs, title=title))


def dots_of(page, title):
    """Hover words of the dots of one chart."""
    picture = re.search(rf'<svg[^>]*aria-label="{title}".*?</svg>', page, re.DOTALL).group()
    return re.findall(r"<circle[^>]*><title>(.*?)</title>", picture)


def test_the_numbers_are_those_of_the_meter():
    runs = pair()
    told = read(runs).table()
    for place, run in enumerate(runs):
        figures = measure(run.events).run
        cells = {name: row[place] for name, row in told.items()}
        assert cells["updates"] == f"{figures.updates:,}"
        assert cells["answers trained on"] == f"{figures.trajectories:,}"
        assert cells["tokens decoded"] == f"{figures.ledger.decoded:,}"
        assert cells["tokens trained on"] == f"{figures.ledger.trained:,}"
        assert cells["tokens discarded"] == f"{figures.ledger.discarded:,}"
        assert cells["bubble"] == f"{100 * figures.bubble:.1f}\xa0%"
        assert float(cells["goodput"].split()[0]) == pytest.approx(figures.goodput, rel=0.05)
        assert float(cells["mean length"].split()[0]) == pytest.approx(
            figures.mean_length, rel=0.05
        )
        assert cells["staleness, mean and maximum"] == (
            f"{figures.mean_staleness:.2f} and {figures.staleness_max}"
        )
        seconds = cells["training time, total"].removesuffix(" s").replace(",", "")
        assert float(seconds) == pytest.approx(figures.seconds, rel=0.05)


def test_scores_are_told_before_after_and_at_their_best():
    told = read([record("ours", scores=(0.25, 0.875, 0.75))]).table()
    assert told["accuracy, first and last evaluation"] == [
        "25.0\xa0% \N{RIGHTWARDS ARROW} 75.0\xa0%"
    ]
    half = sum(isinstance(event, Update) for event in events_of("sorted", "partial")) // 2
    assert told["best evaluation"] == [f"87.5\xa0% after update {half}"]


def test_one_evaluation_is_neither_before_nor_after():
    run = replace(record("ours"), rows=[{"update": 0, "evaluation/score": 0.25}])
    assert read([run]).table()["accuracy, first and last evaluation"] == ["25.0\xa0%"]


def test_the_headline_names_the_best_run_its_gain_and_the_bubbles():
    reader = read(pair())
    assert reader.texts("h1") == ["ours: accuracy goes from 25.0\xa0% to 75.0\xa0%"]
    title, lead = reader.texts("p")[:2]
    assert title == "Two runs"
    assert "+50.0 points for ours, +35.0 points for base" in lead
    ours, base = (measure(run.events).run.bubble for run in pair())
    assert ours < base
    assert f"from {100 * base:.1f}\xa0% (base) to {100 * ours:.1f}\xa0% (ours)" in lead
    ours, base = (measure(run.events).run.goodput for run in pair())
    assert f"from {base:.2f} to {ours:.2f} tokens/s" in lead


def test_the_best_run_is_the_one_that_ends_highest_wherever_it_stands():
    assert read(pair()[::-1]).texts("h1")[0].startswith("ours: ")
    peak = record("peak", scores=(0.25, 0.99, 0.3))
    assert read([peak, *pair()]).texts("h1")[0].startswith("ours: ")


@pytest.mark.parametrize(
    ("scores", "headline"),
    [
        ((0.5,), "one: accuracy 50.0\xa0%"),
        ((0.5, 0.5), "one: accuracy stays at 50.0\xa0%"),
        ((0.5, 0.25), "one: accuracy goes from 50.0\xa0% to 25.0\xa0%"),
    ],
)
def test_a_run_that_learned_nothing_is_not_praised(scores, headline):
    run = record("one")
    rows = [{"update": i, "evaluation/score": score} for i, score in enumerate(scores)]
    assert read([replace(run, rows=rows)]).texts("h1") == [headline]


def test_an_evaluation_stands_at_the_answers_and_seconds_of_the_update_before_it():
    run = pair()[1]
    page = runs_page([run], title="One")
    figures = measure(run.events).run
    by_answers = dots_of(page, "Held-out accuracy by answers trained on")
    assert by_answers == [
        "base: accuracy 25.0 % at 0",
        f"base: accuracy 60.0 % at {figures.trajectories}",
    ]
    by_seconds = dots_of(page, "Held-out accuracy by seconds of training")
    last = float(by_seconds[1].rpartition(" at ")[2].replace(",", ""))
    assert last == pytest.approx(figures.seconds, rel=0.01)


def test_lengths_and_rewards_have_a_dot_for_each_update():
    run = record("ours")
    page = runs_page([run], title="One")
    for what in ("length", "reward"):
        dots = dots_of(page, f"Mean {what} of the answers of an update")
        assert len(dots) == measure(run.events).run.updates


def test_runs_without_metrics_show_their_slots_and_numbers():
    bare = replace(record("bare"), rows=[])
    reader = read([bare])
    assert reader.texts("h1")[0].startswith("bare: slots idle for ")
    assert "Learning" not in reader.texts("h2")
    assert "answers" not in re.findall(r'<section id="([a-z]+)"', reader.text)
    assert "Slots" in reader.texts("h2")
    assert reader.table()["best evaluation"] == ["\N{EN DASH}"]
    both = read([bare, record("whole")])
    assert "bare (none)" in both.texts("text")


def test_numbers_that_are_missing_or_not_finite_are_left_out():
    run = record("ours")
    rows = [dict(row) for row in run.rows]
    rows[1]["reward/mean"] = None
    rows[2]["reward/mean"] = float("nan")
    del rows[3]["reward/mean"]
    page = runs_page([replace(run, rows=rows)], title="One")
    dots = dots_of(page, "Mean reward of the answers of an update")
    assert len(dots) == measure(run.events).run.updates - 3
    assert "nan" not in page


def test_a_large_run_makes_a_page_of_bounded_size():
    run = record("large", preset="paper")
    assert sum(event.kind == "start" for event in run.events) > MAX_BARS / 2
    assert len(runs_page([run] * 3, title="Large")) < 3_000_000


def test_everything_from_outside_is_shown_as_text():
    run = record(NASTY)
    reader = read([run, replace(run, name="other")], title=NASTY)
    tags = {tag for tag, _ in reader.tags}
    assert "img" not in tags
    scripts = [attrs for tag, attrs in reader.tags if tag == "script"]
    assert [attrs for attrs in scripts if "type" not in attrs] == [{}]
    assert reader.texts("title")[0] == SHOWN
    assert reader.texts("p")[0] == SHOWN
    assert SHOWN in reader.texts("th")
    assert not any(name.startswith("on") for _, attrs in reader.tags for name in attrs)


def test_the_page_fetches_nothing_and_its_policy_allows_its_only_style():
    page = runs_page(pair(), title="Two")
    assert not re.search(r"""src=|href=(?!"#)|url\((?!#)|@import""", page)
    styles = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert len(styles) == 1
    digest = base64.b64encode(hashlib.sha256(styles[0].encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in page
    assert " style=" not in page
    assert "prefers-color-scheme:dark" in styles[0]
    assert "prefers-color-scheme: dark" in styles[0]


def test_every_class_of_the_page_has_a_look():
    page = runs_page(pair(), title="Two")
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL).group(1)
    used = {name for names in re.findall(r"class=[\"'](.*?)[\"']", page) for name in names.split()}
    plain = {"ink", "small", "title", "muted"}
    assert {name for name in used - plain if f".{name}" not in style} == set()


def test_the_contents_lead_to_every_part():
    page = runs_page(pair(), title="Two")
    parts = re.findall(r'<section id="([a-z]+)"', page)
    assert re.findall(r'<a href="#([a-z]+)">', page) == parts
    assert parts[:3] == ["slots", "advice", "numbers"]
    assert {"numbers", "slots", "bubbles", "ledger", "lengths", "learning"} <= set(parts)


def test_no_runs_are_refused():
    with pytest.raises(ValueError, match="at least one run"):
        runs_page([], title="None")


def write(folder, run):
    folder.mkdir()
    lines = [to_json(event) + "\n" for event in run.events]
    (folder / "events.jsonl").write_text("".join(lines))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run.rows))


def test_a_folder_gives_the_record_that_was_written_there(tmp_path):
    run = record("first try")
    write(tmp_path / "first try", run)
    found = read_run(tmp_path / "first try")
    assert found == replace(run, events=list(run.events), answers=[])
    assert read_run(tmp_path / "first try", name="other").name == "other"


def test_a_run_killed_in_mid_line_shows_as_far_as_it_came(tmp_path):
    run = record("torn")
    write(tmp_path / "torn", run)
    for name in ("events.jsonl", "metrics.jsonl"):
        path = tmp_path / "torn" / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 5])
    found = read_run(tmp_path / "torn")
    assert 0 < len(found.events) < len(run.events)
    told = read([found]).table()
    figures = measure(found.events).run
    assert told["updates"] == [f"{figures.updates}"]
    header = re.compile(r"<header>.*?</header>", re.DOTALL)
    (note,) = Reader(header.search(read([run, found]).text).group()).texts("li")
    assert note.startswith("torn is in progress or was stopped early")
    assert f"{figures.trajectories} answers" in note
    assert "<li>" not in header.search(read([run]).text).group()


def test_a_run_without_metrics_is_read_and_one_without_events_is_refused(tmp_path):
    write(tmp_path / "run", record("run"))
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert read_run(tmp_path / "run").rows == []
    (tmp_path / "run" / "events.jsonl").write_text("")
    with pytest.raises(DataError, match="first update"):
        read_run(tmp_path / "run")
    (tmp_path / "run" / "events.jsonl").unlink()
    with pytest.raises(DataError, match=r"events\.jsonl"):
        read_run(tmp_path / "run")


def test_the_scripts_of_a_page_declare_every_name_once():
    names = [
        name
        for script in SCRIPTS
        for name in re.findall(
            r"^(?:async )?(?:function\*?|const|let|class) (\w+)", asset(script), re.MULTILINE
        )
    ]
    assert len(names) > 40
    assert sorted(names) == sorted(set(names))


def configured(name, config):
    events = [
        Begin(seconds=0.0, schedule="sync", slots=4, seed=0),
        End(seconds=1.0, rounds=0, trained=0),
    ]
    return measured(RunRecord(name=name, events=events, config=config))


def test_a_single_run_shows_every_setting_behind_a_fold():
    reader = Reader(
        settings_section([configured("a", {"seed": 1, "engine": {"slots": 8, "x": "y"}})])
    )
    assert reader.texts("dt") == ["seed", "engine.slots", "engine.x"]
    assert reader.texts("dd") == ["1", "8", '"y"']
    assert reader.texts("summary") == ["All settings"]
    assert "table" not in reader.kinds()


def test_several_runs_show_what_differs_in_a_table_and_fold_the_rest_away():
    one = {"seed": 1, "epochs": 1, "schedule": {"mode": "partial", "max_staleness": 4}}
    other = {"seed": 2, "epochs": 1, "schedule": {"mode": "partial"}, "threads": 1}
    reader = Reader(settings_section([configured("one", one), configured("other", other)]))
    assert reader.texts("th") == [
        "",
        "one",
        "other",
        "seed",
        "schedule.max_staleness",
        "threads",
    ]
    assert reader.texts("td") == ["1", "2", "4", "\N{EN DASH}", "\N{EN DASH}", "1"]
    assert reader.texts("dt") == ["epochs", "schedule.mode"]
    assert reader.texts("summary") == ["2 settings are the same in all runs"]


def test_true_and_1_are_different_settings():
    reader = Reader(settings_section([configured("a", {"x": True}), configured("b", {"x": 1})]))
    assert reader.texts("td") == ["true", "1"]


def test_equal_runs_say_that_nothing_differs():
    text = settings_section([configured("a", {"seed": 1}), configured("b", {"seed": 1})])
    assert "All settings are the same." in text
    assert "<table" not in text


@pytest.mark.parametrize("others", [[], [("b", {"seed": 1})]])
def test_a_run_without_settings_says_so(others):
    text = settings_section([configured("a", None), *(configured(*other) for other in others)])
    assert "The settings of a are unknown: there is no config.toml." in text
    assert ("<details" in text) == bool(others)


def test_settings_are_text_never_markup():
    configs = [{NASTY: NASTY, "x": number, NASTY + "y": NASTY * number} for number in (1, 2)]
    text = settings_section(
        [configured(NASTY + str(n), config) for n, config in enumerate(configs)]
    )
    text.encode()
    reader = Reader(text)
    assert not {"script", "img"} & reader.kinds()
    assert SHOWN + "0" in reader.texts("th")


@given(any_runs)
def test_what_the_time_was_spent_on_adds_up_to_the_time_of_the_run(run):
    spent = astuple(seconds_spent(run.record.events, run.metrics.run))
    assert min(spent) >= 0
    assert sum(spent) == pytest.approx(run.metrics.run.seconds)


def saving(events, pause):
    """The same run, in which every update is followed by a checkpoint that takes `pause`."""
    late = 0.0
    for event in events:
        yield replace(event, seconds=event.seconds + late)
        late += pause * isinstance(event, Update)


@given(st.sampled_from(["partial", "coupled", "sync"]), st.floats(0.01, 100))
def test_time_after_an_update_is_time_of_saving(schedule, pause):
    before, after = run_of(schedule), tuple(saving(log(schedule), pause))
    run = measured(RunRecord(name="saved", events=after))
    spent = asdict(seconds_spent(after, run.metrics.run))
    plain = asdict(seconds_spent(before.record.events, before.metrics.run))
    updates = sum(isinstance(event, Update) for event in after)
    # an event follows every update but that which ends a log
    assert spent.pop("saving") == pytest.approx(pause * updates)
    assert plain.pop("saving") == pytest.approx(0, abs=1e-9)
    assert spent == pytest.approx(plain)


@pytest.mark.parametrize("schedule", ["partial", "sync"])
def test_advice_does_not_take_the_time_of_saving_for_that_of_updates(schedule):
    plain = diagnose(log(schedule))
    saved = diagnose(tuple(saving(log(schedule), 100.0)))
    assert asdict(saved.measured) == pytest.approx(asdict(plain.measured))
    remedies = {entry.remedy for entry in saved.advice}
    assert remedies == {"Raise saving.every.", *(entry.remedy for entry in plain.advice)}


def test_the_table_has_a_row_for_saving():
    events = list(log("partial"))
    place = next(n for n, event in enumerate(events) if isinstance(event, SyncWeights) and n > 5)
    late = [replace(event, seconds=event.seconds + 3) for event in events[place:]]
    text = numbers_section([measured(RunRecord(name="a", events=[*events[:place], *late]))])
    assert '<th scope="row">saving checkpoints and logs</th><td>3 s, ' in text


def test_the_header_names_model_task_machine_date_and_commit():
    facts = {"machine": "a CPU", "started": "2026-11-17T02:04:05+00:00", "commit": "abc1234"}
    config = {"model": "tiny", "task": NASTY}
    one = replace(record("a"), config=config, facts=facts)
    reader = read([one])
    assert reader.texts("dt")[:5] == ["model", "task", "machine", "started", "commit"]
    assert reader.texts("dd")[:5] == ["tiny", SHOWN, "a CPU", "2026-11-17 02:04 UTC", "abc1234"]
    other = replace(record("b"), config=config | {"model": "large"}, facts=facts)
    assert read([one, other]).texts("dd")[:3] == ["tiny (a); large (b)", SHOWN, "a CPU"]
    assert 'class="facts"' not in runs_page([record("a")], title="none recorded")


def test_the_facts_of_a_run_are_read_from_its_folder(tmp_path):
    log = "".join(to_json(event) + "\n" for event in events_of("sync"))
    (tmp_path / "events.jsonl").write_text(log)
    assert read_run(tmp_path).facts == {}
    (tmp_path / "run.json").write_text('{"format": "sortedrl-run", "version": 1, "machine": "m"}')
    assert read_run(tmp_path).facts == {"format": "sortedrl-run", "machine": "m"}
    (tmp_path / "run.json").write_text("half a li")
    assert read_run(tmp_path).facts == {}


def test_a_prediction_that_another_run_of_the_page_refutes_is_not_shown():
    slow = record("slow", strategy="sync", mode="on_policy")
    advised = re.findall(r"<code>(.*?)</code>", advice_section([measured(slow)]))
    assert any("sorted" in remedy and "partial" in remedy for remedy in advised)
    fast = measured(record("fast"))
    both = advice_section([measured(slow), fast])
    assert re.findall(r"<code>(.*?)</code>", both)[: len(advised)] == advised
    later = [replace(event, seconds=10 * event.seconds) for event in fast.record.events]
    refuting = measured(replace(fast.record, events=later))
    text = advice_section([measured(slow), refuting])
    shown = re.findall(r"<code>(.*?)</code>", text)
    assert not any("sorted" in remedy and "partial" in remedy for remedy in shown)
    assert "predicted to be faster, but fast trained" in text
