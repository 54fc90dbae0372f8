"""The sections about learning: curves, and answers to browse."""

import json
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from browser import NARROW, is_too_wide, keep_screenshot, open_text, set_scheme, set_width
from report_worlds import NASTY, SHOWN
from sortedrl.core.events import Begin, End
from sortedrl.core.files import LoggedAnswer
from sortedrl.report import html
from sortedrl.report.charts.svg import stylesheet
from sortedrl.report.html import asset, data_script, page
from sortedrl.report.record import RunRecord, measured
from sortedrl.report.sections import learning
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.settings import PRESETS

SYSTEM = "You solve logic puzzles. Reason first, then give the result.\n"


def answer(number, **changes):
    made = LoggedAnswer(
        update=1 + number // 4,
        prompt=number,
        sample=0,
        group=number // 8,
        versions=(number // 4, number // 4),
        tokens=10 * number,
        is_truncated=False,
        reward=number / 10,
        parts={"format": 0.5, "right": 1.0},
        question=f"{SYSTEM}Puzzle {number}?",
        response=f"It is {number}.",
    )
    return replace(made, **changes)


def answered(name, kept):
    events = [
        Begin(seconds=0.0, schedule="sync", slots=4, seed=0),
        End(seconds=1.0, rounds=0, trained=0),
    ]
    return measured(RunRecord(name=name, events=events, answers=kept))


def whole_page(runs):
    """A page with nothing but the answers; `refresh` does what a served page does."""
    section = learning.answers_section(runs)
    script = "\n".join(
        [
            '"use strict";',
            asset("browse.js"),
            asset("answers.js"),
            "const state = {};",
            "const source = document.getElementById('answers').outerHTML;",
            "const data = JSON.parse(document.getElementById('data').textContent);",
            "function refresh() {",
            "  const fresh = new DOMParser().parseFromString(source, 'text/html');",
            "  const old = document.getElementById('answers');",
            "  old.replaceWith(document.adoptNode(fresh.getElementById('answers')));",
            "  answersView(document.getElementById('answers'), data, state);",
            "}",
            "answersView(document.getElementById('answers'), data, state);",
        ]
    )
    styles = "".join(asset(name) for name in ("page.css", "run.css", "answers.css"))
    return page(
        title="answers",
        body=f"<main>{section}</main>{data_script('data', learning.answers_data(runs))}",
        style=stylesheet() + styles,
        script=script,
    )


@pytest.fixture
def shown(browser_page, tmp_path):
    """Opens a page of runs."""

    def show(*runs):
        open_text(browser_page, whole_page(runs), tmp_path)
        return browser_page

    return show


def found(page):
    """The prompts of the answers on the page, by the numbers of their puzzles."""
    return [
        int(re.search(r"Puzzle (\d+)", text)[1]) for text in page.locator(".gist").all_inner_texts()
    ]


def open_drawer(page, number=0):
    """Open a drawer of the list; its inside comes a moment later."""
    drawer = page.locator("#answers details").nth(number)
    drawer.locator("summary").click()
    drawer.locator(".inside").wait_for()


@given(st.lists(st.integers(0, 50)), st.integers(0, 60))
def test_shares_of_the_page_are_fair_and_use_the_room(wanted, most):
    counts = learning._fair_counts(wanted, most)
    assert all(count <= want for count, want in zip(counts, wanted, strict=True))
    assert sum(counts) == min(sum(wanted), most)
    short = [count for count, want in zip(counts, wanted, strict=True) if count < want]
    assert all(count <= least + 1 for least in short for count in counts)


@given(st.integers(0, 200), st.data())
def test_chosen_answers_are_one_of_each_equal_stretch_of_the_run(total, data):
    count = data.draw(st.integers(0, total))
    kept = list(range(total))
    chosen = learning._evenly(kept, count)
    assert len(chosen) == count
    assert chosen == sorted(set(chosen))
    stretch = total / count if count else 0
    assert all(after - before <= 2 * stretch for before, after in pairwise(chosen))


@pytest.mark.parametrize("stride", [2, 4, 8, 16])
def test_chosen_answers_are_of_all_ranks_of_length(stride):
    ranks = [rank for _ in range(400) for rank in range(8)]
    chosen = learning._evenly(ranks, len(ranks) // stride)
    shares = [chosen.count(rank) / len(chosen) for rank in range(8)]
    assert all(0.08 < share < 0.18 for share in shares)


def test_the_page_says_how_many_of_how_many_answers_it_shows(monkeypatch):
    kept = [answer(number) for number in range(40)]
    assert "All 40 answers logged as text by the run" in learning.answers_section(
        [answered("a", kept)]
    )
    monkeypatch.setattr(learning, "MAX_ANSWERS", 10)
    runs = [answered("a", kept), answered("b", []), answered("c", kept[:3])]
    text = learning.answers_section(runs)
    assert "10 of 43 answers logged as text by the runs" in text
    assert "sampled evenly" in text
    assert "No answers from b." in text
    assert learning.answers_data(runs)["run"] == [0] * 7 + [2] * 3


def test_there_is_no_section_without_answers():
    assert learning.answers_section([answered("a", [])]) == ""
    assert learning.answers_data([answered("a", [])])["update"] == []


def test_long_texts_lose_their_middle_when_the_page_gets_too_heavy(monkeypatch):
    monkeypatch.setattr(html, "MAX_CHARACTERS", 10_000)
    long = "a" * 4000 + "b" * 4000
    kept = [answer(number, response=long) for number in range(4)] + [answer(4, question=long)]
    data = learning.answers_data([answered("a", kept)])
    beginning, left_out, end = data["response"][0]
    assert len(beginning) + left_out + len(end) == len(long)
    assert long.startswith(beginning)
    assert long.endswith(end)
    assert data["response"][4] == "It is 4."
    assert data["questions"][4][1] == left_out


def test_a_question_that_was_answered_twice_travels_once():
    kept = [answer(number, question=f"Q{number % 2}") for number in range(6)]
    data = learning.answers_data([answered("a", kept)])
    assert data["questions"] == ["Q0", "Q1"]
    assert data["question"] == [0, 1] * 3


def test_rewards_that_are_no_numbers_travel_as_none():
    kept = [answer(0, reward=float("nan"), parts={"x": float("inf")}), answer(1, reward=None)]
    data = learning.answers_data([answered("a", kept)])
    json.dumps(data, allow_nan=False)
    assert data["reward"] == [None, None]
    assert data["parts"][0] == {"x": None}


def test_answers_are_filtered_by_reward_length_and_update(shown):
    page = shown(answered("a", [answer(number) for number in range(20)]))
    assert found(page) == list(range(20))
    page.fill("[name=reward_least]", "0.5")
    page.fill("[name=reward_most]", "1.5")
    assert found(page) == list(range(5, 16))
    page.fill("[name=tokens_least]", "80")
    page.fill("[name=tokens_most]", "140")
    assert found(page) == list(range(8, 15))
    page.fill("[name=update_least]", "4")
    page.fill("[name=update_most]", "4")
    assert found(page) == [12, 13, 14]
    assert page.inner_text("[role=status]") == "3 answers"


def test_answers_are_filtered_by_words_and_truncation(shown):
    kept = [answer(number, is_truncated=number == 3) for number in range(12)]
    page = shown(answered("a", kept))
    page.fill("[name=words]", " IT IS 1")
    assert found(page) == [1, 10, 11]
    page.fill("[name=words]", "puzzle 3?")
    assert page.inner_text("[role=status]") == "1 answer"
    page.fill("[name=words]", "")
    page.check("[name=truncated]")
    assert found(page) == [3]


def test_answers_without_a_reward_come_last_and_fit_no_bound(shown):
    kept = [answer(0, reward=0.5), answer(1, reward=None), answer(2, reward=-1.0)]
    page = shown(answered("a", kept))
    page.select_option("[name=order]", "reward up")
    assert found(page) == [2, 0, 1]
    page.select_option("[name=order]", "reward down")
    assert found(page) == [0, 2, 1]
    page.fill("[name=reward_most]", "5")
    assert found(page) == [0, 2]
    page.fill("[name=reward_most]", "")
    page.fill("[name=reward_least]", "-5")
    assert found(page) == [0, 2]
    page.select_option("[name=order]", "tokens down")
    assert found(page) == [2, 0]


def test_runs_are_told_apart_and_can_be_chosen(shown):
    first = answered("first", [answer(number) for number in range(2)])
    page = shown(first, answered("second", [answer(number + 5) for number in range(2)]))
    assert "first, update 1" in page.locator("summary").first.inner_text()
    page.select_option("[name=run]", "second")
    assert found(page) == [5, 6]


def test_the_list_grows_by_a_page_at_a_time(shown):
    page = shown(answered("a", [answer(number) for number in range(60)]))
    assert len(found(page)) == 25
    page.click("text=show 25 more of 60")
    assert len(found(page)) == 50
    page.click("text=show 10 more of 60")
    assert found(page) == list(range(60))
    assert page.locator("#answers button").is_hidden()


def test_a_drawer_tells_everything_about_its_answer(shown):
    page = shown(answered("a", [answer(9, versions=(0, 2), is_truncated=True)]))
    open_drawer(page)
    assert page.locator("pre").all_inner_texts() == [f"{SYSTEM}Puzzle 9?", "It is 9."]
    names, values = (page.locator(f"#answers {kind}").all_inner_texts() for kind in ("dt", "dd"))
    assert dict(zip(names, values, strict=True)) == {
        "reward": "0.9",
        "— format": "0.5",
        "— right": "1",
        "length": "90 tokens, truncated",
        "generated by version": "0 to 2",
        "trained on in update": "3",
        "prompt": "9 of group 1, answer 0",
    }


def test_gists_leave_out_what_most_questions_open_with(shown):
    kept = [answer(number, question=f"{SYSTEM}Puzzle {number}. Who?") for number in range(4)]
    page = shown(answered("a", [*kept, answer(4, question="Puzzle 4, of another kind")]))
    gists = page.locator(".gist").all_inner_texts()
    assert gists[:4] == [f"\u2026 Puzzle {number}. Who?" for number in range(4)]
    assert gists[4] == "Puzzle 4, of another kind"


def test_a_long_text_says_how_much_of_it_is_left_out(shown, monkeypatch):
    monkeypatch.setattr(html, "MAX_CHARACTERS", 10)
    page = shown(answered("a", [answer(0, response="\x1b" + "a" * 5000 + "\x1b")]))
    open_drawer(page)
    text = page.locator("pre").nth(1).text_content()
    assert text.startswith("\u2039U+001B\u203aaaa")
    assert text.endswith("aaa\u2039U+001B\u203a")
    assert page.inner_text("pre .left-out") == "3,002 characters left out"


def test_what_models_wrote_is_text_never_markup(shown):
    kept = [answer(0, question=NASTY, response=NASTY, parts={NASTY: 1.0}), answer(1)]
    page = shown(answered(NASTY, kept), answered("b", [answer(2)]))
    open_drawer(page)
    assert page.locator("pre").all_inner_texts() == [SHOWN, SHOWN]
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    assert page.locator("dt", has_text="onerror=").count() == 1
    set_width(page, NARROW)
    assert not is_too_wide(page)


def test_filters_pages_and_drawers_survive_a_refresh(shown):
    runs = [answered(name, [answer(number) for number in range(60)]) for name in ("a", "b")]
    page = shown(*runs)
    page.fill("[name=reward_least]", "0.5")
    page.fill("[name=words]", "puzzle")
    page.select_option("[name=order]", "tokens down")
    page.select_option("[name=run]", "b")
    page.click("text=show 25 more")
    open_drawer(page, 30)
    before = found(page)
    page.evaluate("refresh()")
    assert found(page) == before == list(range(59, 9, -1))
    assert page.input_value("[name=words]") == "puzzle"
    assert page.locator("details[open] pre").all_inner_texts()[1] == f"It is {before[30]}."
    page.locator("details[open] summary").click()
    page.check("[name=truncated]")
    page.evaluate("refresh()")
    assert page.is_checked("[name=truncated]")
    assert page.locator("details").count() == 0
    page.uncheck("[name=truncated]")
    assert len(found(page)) == 25
    page.click("text=show 25 more")
    assert page.locator("details[open]").count() == 0


def test_controls_have_names_and_the_page_fits_a_phone_by_day_and_by_night(shown):
    kept = [answer(number) for number in range(8)]
    page = shown(answered("a", kept), answered("b", kept))
    controls = page.locator("#answers input, #answers select")
    named = "e => Boolean(e.labels.length || e.getAttribute('aria-label'))"
    assert controls.count() == 10
    assert all(controls.nth(place).evaluate(named) for place in range(controls.count()))
    page.locator("summary").first.press("Enter")
    page.locator("details[open] pre").first.wait_for()
    keep_screenshot(page, "answers-light-wide")
    set_width(page, NARROW)
    set_scheme(page, "dark")
    assert not is_too_wide(page)
    keep_screenshot(page, "answers-dark-narrow")


@cache
def events():
    found = []
    simulate(PRESETS["picture"](), record=found.append)
    return tuple(found)


def run(name, scores, *, seed=None, answers=100, seconds=10.0, logged=(), **numbers):
    """A run that is evaluated before its first update and after each."""
    rows = [{"update": 0, "evaluation/score": scores[0]}] if scores else []
    for update, score in enumerate(scores[1:], start=1):
        totals = {
            "total/samples": answers * update,
            "total/trained_tokens": 7 * answers * update,
            "total/seconds": seconds * update,
        }
        told = {key.replace("_", "/", 1): value for key, value in numbers.items()}
        rows.append({"update": update, **totals, **told, **dict(logged)})
        rows.append({"update": update, "evaluation/score": score})
    config = None if seed is None else {"seed": seed, "out": name}
    return measured(RunRecord(name=name, events=events(), rows=rows, config=config))


def table(text):
    """The rows of the only table, with the name first."""
    return [
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
        for row in re.findall(r"<tr>(.*?)</tr>", text, flags=re.DOTALL)[1:]
    ]


def titles(text):
    wide = re.sub(r'<div class="at-narrow">.*?</svg></div>', "", text, flags=re.DOTALL)
    return re.findall(r'<text class="title"[^>]*>(.*?)</text>', wide)


def test_scores_are_drawn_by_answers_by_tokens_and_by_seconds():
    text = learning.learning_section([run("a", [0.2, 0.5])])
    assert titles(text) == [
        "Held-out accuracy by answers trained on",
        "Held-out accuracy by tokens trained on",
        "Held-out accuracy by seconds of training",
    ]
    for place in ("100", "700", "10"):
        assert f"a: accuracy 50.0 % at {place}</title>" in text
    assert 'class="series0 band"' not in text
    assert "one sample" in text
    assert "mean of" not in text


def test_runs_that_differ_only_in_the_seed_are_one_line_with_a_band():
    text = learning.learning_section(
        [run("mine0", [0.2, 0.4], seed=0), run("mine1", [0.2, 0.6], seed=1)]
    )
    assert "mine (mean of 2 seeds)" in text
    assert 'class="series0 band"' in text
    assert "mine: accuracy 50.0 % (40.0 % to 60.0 %) at 100</title>" in text
    assert "one sample" not in text
    assert "differ only in the seed" in text
    assert "series1" not in text


def test_numbers_of_updates_are_drawn_where_there_are_any():
    text = learning.learning_section([run("a", [0.2, 0.5], reward_mean=0.5)])
    assert titles(text)[3:] == ["Mean reward of the answers of an update"]
    text = learning.learning_section([run("a", [0.2, 0.5], correction_ess=0.5, entropy_mean=0.1)])
    assert titles(text)[3:] == ["Entropy", "Effective sample size"]
    assert "a: effective sample size 50.0 % at 1</title>" in text


def test_every_number_of_the_trainer_has_a_chart():
    logged = {"loss": 0.1, "grad_norm": 0.4, "kl/mean": 0.2, "gap/max": 2.5e-6}
    logged |= {"policy/clipped_low": 0.1, "policy/clipped_high": 0.2, "policy/clipped_dual": 0.0}
    text = learning.learning_section([run("a", [0.2, 0.5], logged=logged)])
    wanted = ["Loss", "Gradient norm", "KL divergence", "Clip fraction", "Engine-trainer gap"]
    assert titles(text)[3:] == wanted
    assert "a: tokens clipped 30.0 % at 1</title>" in text
    assert "a: gap, nats 2.5e-06 at 1</title>" in text


def test_the_table_says_what_each_needed_for_the_best_score_that_all_reached():
    runs = [
        run("quick", [0.2, 0.6, 0.8], answers=100, seconds=10),
        run("slow", [0.2, 0.4, 0.5, 0.6], answers=200, seconds=40),
    ]
    text = learning.learning_section(runs).replace("\N{NO-BREAK SPACE}", " ")
    assert "The highest accuracy that all runs reached is 60.0 %." in text
    assert "averaged over seeds" not in text
    assert table(text) == [["quick", "100", "700", "10"], ["slow", "600", "4,200", "120"]]


def test_a_run_that_gained_nothing_does_not_lower_the_score_and_may_not_reach_it():
    runs = [
        run("good", [0.2, 0.6]),
        run("fair", [0.2, 0.5]),
        run("flat", [0.2, 0.1]),
        run("unmeasured", []),
    ]
    text = learning.learning_section(runs).replace("\N{NO-BREAK SPACE}", " ")
    assert "The highest accuracy that all runs that improved reached is 50.0 %." in text
    assert [row[1] for row in table(text)] == ["100", "100", "not reached", "not reached"]


def test_seeds_of_a_group_reach_a_score_on_average():
    runs = [
        run("mine0", [0.0, 0.2, 0.8], seed=0, seconds=10),
        run("mine1", [0.0, 0.6, 0.6], seed=1, seconds=30),
        run("other", [0.0, 0.5, 0.4]),
    ]
    text = learning.learning_section(runs)
    assert "averaged over seeds" in text
    assert table(text) == [["mine", "200", "1,400", "40"], ["other", "100", "700", "10"]]


@pytest.mark.parametrize("scores", [[], [0.5], [0.5, 0.4]])
def test_one_that_learned_alone_has_no_table(scores):
    assert "<table" not in learning.learning_section([run("a", [0.2, 0.5]), run("b", scores)])


def test_there_is_no_section_where_nothing_was_measured():
    assert learning.learning_section([run("a", [])]) == ""


def test_rewards_are_shown_where_nothing_was_evaluated():
    rows = [{"update": 1, "reward/mean": 0.25}]
    bare = measured(RunRecord(name="a", events=events(), rows=rows))
    assert titles(learning.learning_section([bare])) == ["Mean reward of the answers of an update"]


def test_names_are_text_never_markup():
    runs = [run(NASTY, [0.1, 0.2], reward_mean=1.0), run(NASTY + "b", [0.1, 0.3])]
    text = learning.learning_section(runs)
    assert "<script" not in text
    assert "</style" not in text
