"""Event logs of fixed scenarios, reproduced byte for byte.

A change of the scheduler shows here as a readable diff. If it is meant:
`python tests/test_goldens.py` writes the logs anew.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from sortedrl.core.events import read_events, to_json
from sortedrl.core.meter import measure
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.settings import PRESETS

GOLDENS = Path(__file__).parent / "goldens"
SIX = PRESETS["six"]()


def scenario(*, groups=1, **schedule):
    return replace(SIX, groups=groups, schedule=replace(SIX.schedule, **schedule))


SCENARIOS = {
    "sync": scenario(strategy="sync", mode="on_policy"),
    "posthoc": scenario(strategy="posthoc", mode="on_policy"),
    "sorted-on-policy": scenario(mode="on_policy"),
    "sorted-partial": scenario(mode="partial"),
    "sorted-coupled": scenario(mode="coupled"),
    "sorted-partial-lookahead": scenario(groups=3, lookahead=1),
    "sorted-partial-max-restarts": scenario(groups=2, lookahead=1, max_restarts=1),
    "sorted-partial-max-staleness": scenario(groups=3, lookahead=2, max_staleness=1),
    "sorted-coupled-prompts": scenario(
        groups=2, mode="coupled", samples_per_prompt=2, harvest_unit="prompt", lookahead=1
    ),
    "ungrouped-on-policy": scenario(groups=2, strategy="ungrouped", mode="on_policy"),
    "tail-batching-on-policy": scenario(
        groups=2, strategy="tail_batching", mode="on_policy", over_launch=1.5
    ),
    "april-partial": scenario(groups=2, strategy="april", over_launch=1.5),
}


def log_of(simulation):
    events = []
    simulate(simulation, record=events.append)
    return "".join(to_json(event) + "\n" for event in events)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_log_is_reproduced_byte_for_byte(name):
    assert log_of(SCENARIOS[name]) == (GOLDENS / f"{name}.jsonl").read_text()


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_kept_log_reads_back_and_its_ledger_balances(name):
    ledger = measure(read_events(GOLDENS / f"{name}.jsonl")).run.ledger
    assert ledger.decoded == ledger.trained + ledger.discarded


def test_no_other_log_lies_about():
    assert {path.stem for path in GOLDENS.glob("*.jsonl")} == set(SCENARIOS)


if __name__ == "__main__":
    GOLDENS.mkdir(exist_ok=True)
    for scenario_name, simulated in SCENARIOS.items():
        (GOLDENS / f"{scenario_name}.jsonl").write_text(log_of(simulated))
