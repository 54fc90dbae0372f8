"""Advice: what a log shows, what is proposed, and what it is predicted to gain."""

from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.config.parsing import nested, replaced
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.core.events import Begin, Load, Update
from sortedrl.core.meter import measure
from sortedrl.evaluation.tables import percent
from sortedrl.report.advice import simulation as simulation_module
from sortedrl.report.advice.diagnosis import diagnose
from sortedrl.report.advice.simulation import IdleSlots, idle, observed_schedule
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.costs import CostSettings
from sortedrl.simulate.fit import fit
from sortedrl.simulate.lengths import LengthSettings
from sortedrl.simulate.settings import PRESETS, Simulation

picture = PRESETS["picture"]()
paper = replace(PRESETS["paper"](), groups=3)


def scheduled(simulation, **changes):
    return replace(simulation, schedule=replace(simulation.schedule, **changes))


@lru_cache(maxsize=64)
def run_of(simulation):
    events = []
    outcome = simulate(simulation, record=events.append)
    return tuple(events), outcome.metrics.run


@lru_cache(maxsize=32)
def diagnosed(simulation):
    return diagnose(run_of(simulation)[0])


def true_gain(simulation, advice):
    before = run_of(simulation)[1].trained_per_second
    return run_of(replaced(simulation, nested(advice.changes)))[1].trained_per_second / before


def with_change(diagnosis, name, value):
    return next(entry for entry in diagnosis.advice if entry.changes.get(name) == value)


SPEED = {
    "the tail of groups asks for lookahead": (
        scheduled(paper, mode="coupled"),
        "schedule.lookahead",
        1,
    ),
    "so does a small one": (picture, "schedule.lookahead", 2),
    "waiting for the longest asks for sorted, on-policy": (
        scheduled(paper, strategy="sync"),
        "schedule.mode",
        "coupled",
    ),
    "waiting for the longest asks for sorted, fast": (
        scheduled(paper, strategy="posthoc"),
        "schedule.mode",
        "partial",
    ),
    "launching too many asks for sorted": (
        scheduled(paper, strategy="april"),
        "schedule.strategy",
        "sorted",
    ),
    "redrawn answers ask for coupled": (
        scheduled(paper, mode="on_policy"),
        "schedule.mode",
        "coupled",
    ),
    "redrawn answers that resemble each other ask for partial": (
        replace(
            scheduled(paper, mode="on_policy"), groups=4, lengths=LengthSettings(prompt_share=0.5)
        ),
        "schedule.mode",
        "partial",
    ),
    "dropped tokens ask for a larger max_staleness": (
        scheduled(paper, max_staleness=0),
        "schedule.max_staleness",
        1,
    ),
    "slots that are never full ask for larger groups": (
        replace(scheduled(paper, group_prompts=64, update_batch=32), groups=16),
        "schedule.group_prompts",
        256,
    ),
    "dear updates ask for fewer of them": (
        replace(paper, costs=CostSettings(update_seconds=60.0)),
        "schedule.update_batch",
        512,
    ),
    "full slots and cheap answers ask for more slots": (
        scheduled(paper, lookahead=2),
        "engine.slots",
        256,
    ),
}


@pytest.mark.parametrize("case", SPEED)
def test_the_predicted_gain_is_the_true_one(case):
    simulation, name, value = SPEED[case]
    diagnosis = diagnosed(simulation)
    advice = with_change(diagnosis, name, value)
    assert advice.gain >= 1.02
    assert advice.gain == pytest.approx(true_gain(simulation, advice), rel=0.15)
    assert f"{name} = " in advice.remedy
    assert diagnosis.error == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize(
    ("simulation", "error"),
    [
        (picture, 1e-6),
        (scheduled(paper, strategy="sync"), 1e-6),
        (scheduled(paper, mode="coupled"), 0.05),
    ],
    ids=["sorted", "sync", "coupled"],
)
def test_a_run_without_redraws_is_simulated_as_it_was(simulation, error):
    diagnosis = diagnosed(simulation)
    measured, predicted = diagnosis.measured, diagnosis.predicted
    assert diagnosis.fit_error < 1e-9
    assert predicted.bubble == pytest.approx(measured.bubble, abs=error)
    assert predicted.goodput == pytest.approx(measured.goodput, rel=error)
    assert predicted.seconds == pytest.approx(measured.seconds, rel=error)


def test_measured_numbers_are_those_of_the_meter():
    events, run = run_of(picture)
    measured = diagnose(events).measured
    assert measured.bubble == run.bubble == measure(events).run.bubble
    assert measured.goodput == run.goodput
    assert measured.trained_per_second == run.trained_per_second
    assert measured.seconds == run.seconds


def test_speed_is_given_best_first_and_only_from_two_per_cent_on():
    for simulation, _, _ in SPEED.values():
        gains = [entry.gain for entry in diagnosed(simulation).advice if entry.about == "speed"]
        assert gains == sorted(gains, reverse=True)
        assert all(gain >= 1.02 for gain in gains)


@pytest.mark.parametrize("case", ["the tail of groups asks for lookahead", "so does a small one"])
@pytest.mark.parametrize("error", [0.0, 0.05, 0.1, 0.5])
def test_a_gain_within_the_error_of_its_prediction_is_noted_and_not_advised(
    case, error, monkeypatch
):
    simulation, _, _ = SPEED[case]
    events, _ = run_of(simulation)
    monkeypatch.setattr(
        "sortedrl.report.advice.diagnosis.fit",
        lambda *given, **named: replace(fit(*given, **named), relative_error=error),
    )
    found = diagnose(events)
    gain = 1 + max(entry.gain - 1 for entry in diagnosed(simulation).advice)
    assert found.prediction_error >= error
    assert all(entry.gain - 1 > found.prediction_error for entry in found.advice)
    if gain - 1 > found.prediction_error:
        assert found.summary.startswith("Set schedule.lookahead")
    else:
        assert f"more than the prediction error of {percent(error)}" in found.summary
        assert any(f"prediction error of {percent(error)}, not advised" in n for n in found.notes)
    if error:
        assert f"this error of {percent(error)} are not advised" in found.trust


def test_updates_that_cost_by_the_token_are_not_made_cheaper_by_larger_ones():
    simulation = replace(paper, costs=CostSettings(update_token_seconds=6e-4))
    diagnosis = diagnosed(simulation)
    assert diagnosis.measured.rollout_share < 0.6
    assert not any("schedule.update_batch" in entry.changes for entry in diagnosis.advice)
    assert any("schedule.update_batch = 256" in note for note in diagnosis.notes)


def test_a_low_effective_sample_size_asks_for_fresher_tokens_whatever_that_costs():
    simulation = scheduled(paper, lookahead=2)
    rows = [{"correction/ess": 0.9}, {"correction/ess": None}, {"correction/ess": 0.3}, {}]
    diagnosis = diagnose(run_of(simulation)[0], rows=rows)
    first, second = diagnosis.advice[:2]
    assert {first.about, second.about} == {"learning"}
    fresher = with_change(
        diagnosis, "schedule.max_staleness", diagnosis.measured.max_staleness // 2
    )
    coupled = with_change(diagnosis, "schedule.mode", "coupled")
    assert fresher.gain < 1
    assert fresher.after.mean_staleness < fresher.before.mean_staleness
    assert coupled.after.mean_staleness == 0
    for entry in (fresher, coupled):
        assert entry.gain == pytest.approx(true_gain(simulation, entry), rel=0.15)
        assert "30.0 %" in entry.symptom


def test_a_low_effective_sample_size_of_fresh_tokens_is_not_blamed_on_the_schedule():
    events, _ = run_of(scheduled(picture, mode="coupled"))
    diagnosis = diagnose(events, rows=[{"correction/ess": 0.2}])
    (note,) = (entry for entry in diagnosis.advice if "effective sample size" in entry.symptom)
    assert note.gain is None
    assert "no token is stale" in note.symptom


def test_slots_that_no_answer_ever_used_may_go():
    simulation = replace(
        scheduled(picture, strategy="sync"), engine=EngineSettings(slots=20, max_tokens=256)
    )
    fewer = with_change(diagnosed(simulation), "engine.slots", 8)
    assert fewer.gain == pytest.approx(1)
    assert fewer.about == "memory"


def test_answers_cut_off_at_the_limit_are_noted_without_a_prediction():
    simulation = replace(picture, engine=EngineSettings(slots=8, max_tokens=40))
    note = diagnosed(simulation).advice[-1]
    assert "ended at the limit of 40 tokens" in note.symptom
    assert note.gain is None
    assert not note.changes


def test_full_slots_leave_nothing_to_gain():
    simulation = Simulation(
        groups=8,
        schedule=Schedule(group_prompts=32, update_batch=8, lookahead=2),
        engine=EngineSettings(slots=8, max_tokens=64),
        lengths=LengthSettings(median=20, sigma=0.1, prompt_tokens=0),
        costs=CostSettings(hardware="ticks", step_seconds=0.0, sequence_seconds=1.0),
    )
    diagnosis = diagnosed(simulation)
    assert diagnosis.advice == ()
    assert "no simulated change is predicted to gain 2 % or more" in diagnosis.summary


def test_settings_at_hand_are_used_and_left_out_ones_read_off_the_log():
    for changes in (
        {},
        {"mode": "coupled", "lookahead": 1},
        {"strategy": "april"},
        {"strategy": "ungrouped", "mode": "coupled"},
        {"group_prompts": 16, "samples_per_prompt": 4, "harvest_unit": "prompt"},
        {"group_prompts": 16, "samples_per_prompt": 4},
    ):
        simulation = scheduled(picture, **changes)
        events, _ = run_of(simulation)
        assert observed_schedule(events) == simulation.schedule
        given = diagnose(events, schedule=simulation.schedule, engine=simulation.engine)
        read = diagnose(events)
        assert [entry.gain for entry in given.advice] == [entry.gain for entry in read.advice]
    guessed = diagnosed(scheduled(picture, strategy="sync")).advice[0]
    assert guessed.changes["schedule.group_prompts"] == 4 * picture.schedule.update_batch


def test_a_smaller_last_update_does_not_hide_the_update_batch():
    events, _ = run_of(replace(scheduled(picture, strategy="sync"), prompts=36))
    assert observed_schedule(events).update_batch == picture.schedule.update_batch


def test_a_long_run_is_judged_by_groups_from_all_of_it(monkeypatch):
    monkeypatch.setattr(simulation_module, "_MOST_TRAJECTORIES", 512)
    growing = replace(picture.lengths, drift=0.004)
    simulation = replace(scheduled(picture, strategy="sync"), groups=64, lengths=growing)
    diagnosis = diagnosed(simulation)
    measured, predicted = diagnosis.measured, diagnosis.predicted
    assert predicted.mean_length == pytest.approx(measured.mean_length, rel=0.05)
    assert predicted.seconds == pytest.approx(measured.seconds, rel=0.05)


def test_a_run_that_goes_on_is_compared_as_far_as_it_came():
    events, _ = run_of(picture)
    updates = [place for place, event in enumerate(events) if isinstance(event, Update)]
    diagnosis = diagnose(events[: updates[len(updates) // 2] + 1])
    measured, predicted = diagnosis.measured, diagnosis.predicted
    assert predicted.seconds == pytest.approx(measured.seconds)
    assert predicted.bubble == pytest.approx(measured.bubble)


def test_a_run_in_its_first_group_is_told_what_the_next_ones_would_gain():
    events, _ = run_of(picture)
    close = next(n for n, event in enumerate(events) if isinstance(event, Update) and event.closed)
    diagnosis = diagnose(events[: close + 1])
    (advice,) = (entry for entry in diagnosis.advice if "schedule.lookahead" in entry.changes)
    assert advice.gain == pytest.approx(true_gain(picture, advice), rel=0.15)


cut_runs = [
    picture,
    scheduled(picture, mode="on_policy"),
    scheduled(picture, mode="coupled", lookahead=1),
    scheduled(picture, strategy="sync"),
    scheduled(picture, strategy="tail_batching", group_prompts=8, samples_per_prompt=4),
    scheduled(picture, max_staleness=0, group_prompts=8, samples_per_prompt=4),
]


@given(st.sampled_from(cut_runs), st.floats(0, 1), st.floats(0.01, 1))
@settings(max_examples=20, deadline=None)
def test_a_killed_run_is_diagnosed_or_told_why_not(simulation, share, size):
    events, _ = run_of(simulation)
    cut = events[: round(share * len(events))]
    diagnosis = diagnose(cut, rows=[{"correction/ess": size}])
    has_updates = any(isinstance(event, Update) for event in cut)
    assert (diagnosis.reason is None) == (diagnosis.measured is not None)
    assert diagnosis.summary
    if not has_updates:
        assert "No prediction yet" in diagnosis.summary
        assert diagnosis.trust is None
    if share > 0.5:
        assert diagnosis.reason is None
        assert "With its own settings the simulated run" in diagnosis.trust


def test_a_log_of_an_unknown_schedule_is_still_read():
    events, _ = run_of(picture)
    named = [
        replace(event, schedule="mine") if isinstance(event, Begin) else event for event in events
    ]
    assert diagnose(named).schedule == picture.schedule


picture = PRESETS["picture"]()


def events_of(**changes):
    events = []
    schedule = replace(picture.schedule, **changes)
    simulate(replace(picture, schedule=schedule), record=events.append)
    return events


@given(
    st.sampled_from(["sync", "posthoc", "sorted", "ungrouped", "tail_batching", "april"]),
    st.sampled_from(["on_policy", "partial", "coupled"]),
    st.sampled_from([1, 4]),
    st.floats(0.1, 1),
)
@settings(max_examples=15, deadline=None)
def test_the_places_add_up_to_the_bubble_of_the_meter(strategy, mode, samples, share):
    events = events_of(
        strategy=strategy, mode=mode, samples_per_prompt=samples, group_prompts=32 // samples
    )
    events = events[: max(1, round(share * len(events)))]
    found, run = idle(events), measure(events).run
    assert found.rollout_seconds == pytest.approx(run.rollout_seconds)
    assert found.total == pytest.approx(run.bubble * run.slots * run.rollout_seconds, abs=1e-6)
    assert min(found.tail, found.ending, found.elsewhere) >= -1e-9
    assert 0 <= found.full_share <= 1
    assert found.peak <= run.slots


def test_lookahead_empties_the_tail():
    tail, ahead = idle(events_of()), idle(events_of(lookahead=3))
    assert tail.tail_share > 0.5
    assert ahead.tail == 0
    assert ahead.ending > 0


def test_what_is_idle_after_the_last_load_is_no_tail():
    events = events_of(group_prompts=128, update_batch=8)
    assert sum(isinstance(event, Load) for event in events) == 4
    alone = events_of(strategy="sync", group_prompts=32, update_batch=32)
    assert idle(alone).tail > 0
    assert idle(alone).ending > 0


def test_a_log_without_an_end_has_no_ending():
    events = events_of()
    whole, cut = idle(events), idle(events[:-1])
    assert cut.tail == whole.tail + whole.ending
    assert cut.ending == 0


@pytest.mark.parametrize("mode", ["on_policy", "coupled"])
def test_sorted_leaves_no_work_waiting_beside_an_idle_slot(mode):
    events = events_of(mode=mode, samples_per_prompt=4, group_prompts=8, harvest_unit="prompt")
    assert idle(events).elsewhere == 0


def test_an_empty_log_has_no_idle_slots():
    assert idle([]) == IdleSlots()
    assert IdleSlots().tail_share == IdleSlots().full_share == 0
