import pytest

from report_worlds import NASTY, SHOWN, Reader
from sortedrl.events import Begin, End
from sortedrl.report import page
from sortedrl.report.record import RunRecord, measured


def run(name, config):
    events = [
        Begin(seconds=0.0, schedule="sync", slots=4, seed=0),
        End(seconds=1.0, rounds=0, trained=0),
    ]
    return measured(RunRecord(name=name, events=events, config=config))


def test_a_single_run_shows_every_setting_behind_a_fold():
    reader = Reader(
        page.settings_section([run("a", {"seed": 1, "engine": {"slots": 8, "x": "y"}})])
    )
    assert reader.texts("dt") == ["seed", "engine.slots", "engine.x"]
    assert reader.texts("dd") == ["1", "8", '"y"']
    assert reader.texts("summary") == ["All settings"]
    assert "table" not in reader.kinds()


def test_several_runs_show_what_differs_in_a_table_and_fold_the_rest_away():
    one = {"seed": 1, "epochs": 1, "schedule": {"mode": "partial", "max_staleness": 4}}
    other = {"seed": 2, "epochs": 1, "schedule": {"mode": "partial"}, "threads": 1}
    reader = Reader(page.settings_section([run("one", one), run("other", other)]))
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
    reader = Reader(page.settings_section([run("a", {"x": True}), run("b", {"x": 1})]))
    assert reader.texts("td") == ["true", "1"]


def test_equal_runs_say_that_nothing_differs():
    text = page.settings_section([run("a", {"seed": 1}), run("b", {"seed": 1})])
    assert "All settings are the same." in text
    assert "<table" not in text


@pytest.mark.parametrize("others", [[], [("b", {"seed": 1})]])
def test_a_run_without_settings_says_so(others):
    text = page.settings_section([run("a", None), *(run(*other) for other in others)])
    assert "Unknown, because there is no config.toml: a." in text
    assert ("<details" in text) == bool(others)


def test_settings_are_text_never_markup():
    configs = [{NASTY: NASTY, "x": number, NASTY + "y": NASTY * number} for number in (1, 2)]
    text = page.settings_section([run(NASTY + str(n), config) for n, config in enumerate(configs)])
    text.encode()
    reader = Reader(text)
    assert not {"script", "img"} & reader.kinds()
    assert SHOWN + "0" in reader.texts("th")
