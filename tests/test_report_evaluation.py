import base64
import hashlib
import json
import re

import pytest

from browser import NARROW, is_too_wide, open_text, set_width
from evaluation_worlds import answer, verdicts
from report_worlds import NASTY, SHOWN, Reader
from sortedrl.evaluation import statistics as intervals
from sortedrl.evaluation.comparison import compare
from sortedrl.evaluation.statistics import Asked, Evaluation
from sortedrl.report import evaluation as evaluation_module
from sortedrl.report import html
from sortedrl.report.evaluation import evaluation_page
from sortedrl.report.html import data_script, escape


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 400)


def made(rows, *, label="model", **changes):
    levels = [str(number % 3) for number in range(len(rows))]
    evaluation = verdicts(rows, label=label, levels=levels)
    return Evaluation(label=label, answers=evaluation.answers, **changes)


def pages():
    old = made([[1, 0, 0, 0]] * 5 + [[0, 0, 0, 0]] * 4, label="old", settings={"seed": 1})
    new = made([[1, 1, 1, 0]] * 5 + [[0, 0, 1, 0]] * 4, label="new", settings={"seed": 1})
    return {
        "one": evaluation_page([old], None),
        "compared": evaluation_page([old, new], compare(old, new)),
        "three": evaluation_page([old, new, made([[1]], label="third")], None),
        "single answers": evaluation_page([verdicts([[1], [0]])], None),
        "all wrong": evaluation_page([verdicts([[0]])], None),
    }


@pytest.fixture(scope="module")
def every_page():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "RESAMPLES", 400)
        return pages()


def test_every_page_is_well_formed_and_names_no_id_twice(every_page):
    for text in every_page.values():
        reader = Reader(text)
        ids = reader.attributes("id")
        assert len(ids) == len(set(ids))
        assert text.encode().decode() == text


def test_nothing_is_fetched_and_nothing_runs_but_the_page_s_own_script(every_page):
    for text in every_page.values():
        reader = Reader(text)
        names = {name for _, attrs in reader.tags for name in attrs}
        assert not {"src", "href", "srcset", "action", "style"} & names
        assert not [name for name in names if name.startswith("on")]
        assert "url(http" not in text
        assert "@import" not in text
        addresses = set(re.findall(r"https?://[^\s\"'<>]+", text))
        assert addresses == {"http://www.w3.org/2000/svg"}


def test_the_policy_allows_exactly_the_style_and_the_script_of_the_page(every_page):
    for text in every_page.values():
        (policy,) = [p for p in Reader(text).attributes("content") if "default-src" in p]
        assert policy.startswith("default-src 'none';")
        for element in ("script", "style"):
            (content,) = re.findall(f"<{element}>(.*?)</{element}>", text, flags=re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            assert f"{element}-src 'sha256-{digest}'" in policy


def test_what_models_and_data_wrote_is_text_never_markup():
    answers = [
        answer(
            number,
            0,
            task=NASTY,
            level=f"{number}{NASTY}",
            question=NASTY,
            gold=NASTY,
            response=NASTY,
            parts={NASTY: 1.0},
            is_correct=is_correct,
        )
        for number, is_correct in enumerate([True, False])
    ]
    old = Evaluation(label=NASTY, answers=answers, settings={NASTY: NASTY})
    text = evaluation_page([old, old], compare(old, old))
    text.encode("utf-8")
    reader = Reader(text)
    assert [tag for tag, _ in reader.tags].count("script") == 2
    assert "img" not in {tag for tag, _ in reader.tags}
    assert "<!--" not in text
    assert SHOWN in " ".join(reader.texts("h2"))
    data = reader.data()
    assert data["labels"] == [NASTY, NASTY]
    assert data["prompts"][0] == {
        "task": NASTY,
        "id": 0,
        "level": f"0{NASTY}",
        "question": NASTY,
        "gold": NASTY,
    }
    assert data["answers"][0]["response"] == NASTY
    assert data["answers"][0]["parts"] == {NASTY: 1.0}


def test_data_cannot_leave_its_element():
    script = data_script("data", {NASTY: [NASTY, "\u2029]]>"]})
    inside = script.removeprefix('<script type="application/json" id="data">')
    inside = inside.removesuffix("</script>")
    assert not set("<>&") & set(inside)
    assert inside.isascii()
    assert json.loads(inside) == {NASTY: [NASTY, "\u2029]]>"]}
    with pytest.raises(ValueError, match="JSON compliant"):
        data_script("data", float("nan"))


def test_escaped_text_has_no_signs_of_markup_and_no_broken_characters():
    assert escape("<a href='x'>&\"") == "&lt;a href=&#x27;x&#x27;&gt;&amp;&quot;"
    assert escape("a\x00\ud800b\n") == "a\u2039U+0000\u203a\u2039U+D800\u203ab\n"


def test_the_headline_says_in_words_what_was_found():
    (one,) = Reader(evaluation_page([verdicts([[1]] * 3 + [[0]])], None)).texts("h1")
    assert one.replace("\N{NO-BREAK SPACE}", " ") == "model: 75.0 % accuracy on sums"
    old, new = verdicts([[0]] * 40, label="old"), verdicts([[1]] * 20 + [[0]] * 20, label="new")
    (better,) = Reader(evaluation_page([old, new], compare(old, new))).texts("h1")
    assert better == "new is better than old by 50.0 points"
    (worse,) = Reader(evaluation_page([new, old], compare(new, old))).texts("h1")
    assert worse == "old is worse than new by 50.0 points"
    (same,) = Reader(evaluation_page([new, new], compare(new, new))).texts("h1")
    assert same == "No clear difference between new and new"


def test_tables_hold_every_task_and_level(every_page):
    reader = Reader(every_page["one"])
    assert [t for t in reader.texts("th") if t in ("sums", "level 0", "level 1", "level 2")] == [
        "sums",
        "level 0",
        "level 1",
        "level 2",
    ]
    assert {"mean@4", "pass@2", "pass@4", "tokens"} <= set(reader.texts("th"))


def test_there_is_a_picture_of_levels_curves_and_lengths_for_every_task(every_page):
    labels = [label for label in Reader(every_page["one"]).attributes("aria-label") if label]
    assert "Accuracy by level in sums" in labels
    assert "pass@k in sums" in labels
    assert "Lengths in sums" in labels
    plain = Reader(every_page["single answers"]).attributes("aria-label")
    assert "pass@k in sums" not in plain


def test_what_a_reader_must_not_miss_is_noted():
    answers = [
        answer(0, 0, finish_reason="length"),
        answer(1, 0, failure="timeout", reward=None),
        answer(0, 1),
    ]
    asked = {"sums": Asked(prompts=9, samples=2), "maths": Asked(prompts=1, samples=1)}
    old = Evaluation(label="old", answers=answers, asked=asked, settings={"seed": 1})
    new = Evaluation(label="new", answers=answers, settings={"seed": 2})
    notes = Reader(evaluation_page([old, new], compare(old, new))).texts("li")
    notes = [note.replace("\N{NO-BREAK SPACE}", " ") for note in notes]
    assert "old, maths: no answers yet; the task is not counted." in notes
    assert any("7 prompts without an answer, 1 with fewer than 2" in note for note in notes)
    assert "old, sums: scoring failed for 1 answer, counted as wrong (timeout 1)." in notes
    assert "old, sums: 25.0 % of the answers reached the token limit." in notes
    assert "seed differs: 1 for old, 2 for new." in notes


def test_the_answers_and_the_flips_travel_with_the_page(every_page):
    data = Reader(every_page["compared"]).data()
    assert data["labels"] == ["old", "new"]
    assert data["tasks"] == {"sums": ["0", "1", "2"]}
    assert len(data["answers"]) == 72
    flips = data["flips"]
    assert len(flips) == 5
    for flip in flips:
        old, new = (data["answers"][number] for number in flip["answers"])
        assert (old["model"], new["model"]) == (0, 1)
        assert (old["right"], new["right"]) == (False, True)
        assert old["prompt"] == new["prompt"] == flip["prompt"]


def test_too_many_answers_are_chosen_evenly_over_the_prompts(monkeypatch):
    monkeypatch.setattr(evaluation_module, "MAX_SAMPLES", 50)
    evaluation = verdicts([[1, 0]] * 100)
    text = evaluation_page([evaluation], None)
    data = Reader(text).data()
    assert [data["prompts"][a["prompt"]]["id"] for a in data["answers"]] == list(range(0, 100, 2))
    assert "50 of 200 answers, evenly chosen over the prompts." in text


def test_second_answers_come_when_every_prompt_has_its_first(monkeypatch):
    monkeypatch.setattr(evaluation_module, "MAX_SAMPLES", 15)
    data = Reader(evaluation_page([verdicts([[1, 0]] * 10)], None)).data()
    counts = [a["sample"] for a in data["answers"]]
    assert (counts.count(0), counts.count(1)) == (10, 5)


def test_flipped_prompts_are_always_among_the_answers(monkeypatch):
    monkeypatch.setattr(evaluation_module, "MAX_SAMPLES", 10)
    monkeypatch.setattr(evaluation_module, "MAX_FLIPS", 2)
    rows = [[0]] * 60
    old, new = verdicts(rows, label="old"), verdicts([*rows[:57], [1], [1], [1]], label="new")
    data = Reader(evaluation_page([old, new], compare(old, new))).data()
    assert [data["prompts"][flip["prompt"]]["id"] for flip in data["flips"]] == [57, 58]
    assert len(data["answers"]) == 10


def test_long_answers_lose_their_middle_when_the_page_gets_too_heavy(monkeypatch):
    monkeypatch.setattr(html, "MAX_CHARACTERS", 10_000)
    long = "a" * 4000 + "b" * 4000
    answers = [answer(number, 0, response=long) for number in range(4)] + [answer(4, 0)]
    data = Reader(evaluation_page([Evaluation(label="m", answers=answers)], None)).data()
    beginning, left_out, end = data["answers"][0]["response"]
    assert len(beginning) + left_out + len(end) == len(long)
    assert long.startswith(beginning)
    assert long.endswith(end)
    assert len(beginning) + len(end) == 2000
    assert data["answers"][4]["response"] == "I do not know."


def test_a_page_needs_its_evaluations():
    evaluation = verdicts([[1]])
    with pytest.raises(ValueError, match="1 evaluations or more, got 0"):
        evaluation_page([], None)
    with pytest.raises(ValueError, match="2 evaluations or more, got 1"):
        evaluation_page([evaluation], compare(evaluation, evaluation))


def test_the_same_evaluation_makes_the_same_page(every_page):
    assert pages() == every_page


def test_answers_and_flips_can_be_browsed(every_page, browser_page, tmp_path):
    open_text(browser_page, every_page["compared"], tmp_path)
    assert browser_page.inner_text("#count") == "72 answers"
    assert browser_page.locator("#answers details").count() == 25
    browser_page.click("#more")
    assert browser_page.locator("#answers details").count() == 50
    browser_page.select_option("[name=level]", "1")
    browser_page.select_option("[name=verdict]", "right")
    browser_page.select_option("[name=model]", "old")
    assert browser_page.inner_text("#count") == "2 answers"
    browser_page.locator("#answers summary").first.click()
    browser_page.locator("#answers .inside").wait_for()
    assert browser_page.locator("#answers dt").all_inner_texts()[0] == "reward"
    assert browser_page.locator("#flips details").count() == 5
    browser_page.select_option("[name=way]", "to wrong")
    assert browser_page.locator("#flips details").count() == 0
    browser_page.select_option("[name=way]", "to right")
    browser_page.locator("#flips summary").first.click()
    browser_page.locator("#flips .inside").wait_for()
    assert browser_page.locator("#flips .sides > div").count() == 2


def test_the_browser_shows_what_models_wrote_as_text(browser_page, tmp_path):
    wrong = answer(0, 0, question=NASTY, gold=NASTY, response=NASTY, parts={NASTY: 1.0})
    evaluation = Evaluation(label=NASTY, answers=[wrong])
    open_text(browser_page, evaluation_page([evaluation], None), tmp_path)
    browser_page.click("#answers summary")
    browser_page.locator("#answers .inside").wait_for()
    assert browser_page.locator("#answers pre").all_text_contents() == [SHOWN] * 3
    assert browser_page.locator("#answers pre").count() == 3
    assert browser_page.locator("img").count() == 0


def test_long_names_of_tasks_do_not_widen_the_page_of_a_phone(browser_page, tmp_path):
    spec = "knights_knaves:people=3-4,style=compact,count=24,split=test,seed={}"
    parts = [verdicts([[1], [0]], task=spec.format(seed)) for seed in range(2)]
    evaluation = Evaluation(label="m", answers=[one for part in parts for one in part.answers])
    set_width(browser_page, NARROW)
    open_text(browser_page, evaluation_page([evaluation], None), tmp_path)
    browser_page.locator("#answers summary").first.wait_for()
    assert not is_too_wide(browser_page)
