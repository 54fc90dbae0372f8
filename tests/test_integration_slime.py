"""The laws of a slime run with our rollout function, and slime's own contract tests on it.

Needs the source of slime, which is on no package index: SLIME_SOURCE=FOLDER make test-slime.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from slime_run import SOURCE

if SOURCE is None:
    pytest.skip("SLIME_SOURCE does not name the folder of slime's source", allow_module_level=True)

from slime_run.router import Router, answer_from
from slime_run.run import BATCH, ROWS, SAMPLES, arguments, measure_in, rollouts
from sortedrl.core.events import read_events
from sortedrl.errors import ConfigError
from sortedrl.integrations.slime import SortedDataSource, generate_rollout
from sortedrl.integrations.slime.rollout import schedule_for

_UPDATES = 2 * ROWS // BATCH


@pytest.fixture
def router():
    """A router on a port of its own."""
    served = Router()
    yield served
    served.close()


def _prompt(sample):
    return sample.prompt.split()[0]


def _refuse_lost_or_repeated(outputs):
    """Every prompt is trained once per epoch, whole, in batches of the exact size."""
    assert len(outputs) == _UPDATES
    for output in outputs:
        assert [len(group) for group in output.samples] == [SAMPLES] * BATCH
    groups = [group for output in outputs for group in output.samples]
    assert len({sample.index for group in groups for sample in group}) == len(groups) * SAMPLES
    per_epoch = len(groups) // 2
    for epoch in (groups[:per_epoch], groups[per_epoch:]):
        assert Counter(_prompt(group[0]) for group in epoch) == {f"w{n}": 1 for n in range(ROWS)}


def _refuse_broken_answers(outputs):
    """Every answer is the one its first token decides, with a log-probability for each token."""
    for sample in (s for output in outputs for group in output.samples for s in group):
        answer = sample.tokens[-sample.response_length :]
        assert answer == answer_from(answer[0])
        assert len(sample.rollout_log_probs) == sample.response_length
        assert sample.reward == sample.response_length
        assert sample.status == type(sample.status).COMPLETED


def _stalest(outputs):
    return max(output.metrics["rollout/sortedrl/max_staleness"] for output in outputs)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_partial_mode_resumes_what_was_aborted_and_trains_every_prompt_once(
    tmp_path, router, lookahead
):
    """Short prompts come first, staleness keeps its bound, and the events make a log."""
    lengths = tmp_path / "lengths.jsonl"
    args = arguments(
        tmp_path, router, sortedrl_lookahead=lookahead, custom_rm_path=measure_in(lengths)
    )
    outputs = rollouts(SortedDataSource(args), args, router, range(_UPDATES))

    _refuse_lost_or_repeated(outputs)
    _refuse_broken_answers(outputs)
    assert 0 < _stalest(outputs) <= schedule_for(args).staleness_bound
    assert sum(output.metrics["rollout/sortedrl/interrupted"] for output in outputs) > 0
    for output in outputs:
        tokens = [sum(s.response_length for s in group) for group in output.samples]
        assert tokens == sorted(tokens)
    assert list(read_events(tmp_path / "save" / "sortedrl" / "events.jsonl"))
    assert len(lengths.read_text().splitlines()) >= 2 * ROWS * SAMPLES


def test_redraw_mode_is_on_policy_and_sends_every_answer_its_seed_again(tmp_path, router):
    """As many seeds as answers, however often they were interrupted."""
    args = arguments(
        tmp_path, router, sortedrl_mode="redraw", sglang_enable_deterministic_inference=True
    )
    outputs = rollouts(SortedDataSource(args), args, router, range(_UPDATES))

    _refuse_lost_or_repeated(outputs)
    _refuse_broken_answers(outputs)
    assert _stalest(outputs) == 0
    assert len(set(router.seeds)) == 2 * ROWS * SAMPLES < len(router.seeds)


def test_on_policy_mode_trains_nothing_stale(tmp_path, router):
    """What is interrupted begins anew."""
    args = arguments(tmp_path, router, sortedrl_mode="on_policy")
    outputs = rollouts(SortedDataSource(args), args, router, range(_UPDATES))

    _refuse_lost_or_repeated(outputs)
    _refuse_broken_answers(outputs)
    assert _stalest(outputs) == 0
    assert all(
        set(s.weight_versions) == {str(number)}
        for number, output in enumerate(outputs)
        for group in output.samples
        for s in group
    )


@pytest.mark.parametrize("mode", ["partial", "on_policy"])
def test_a_resumed_run_loses_no_prompt_and_trains_none_twice(tmp_path, router, mode):
    """Half-written and complete answers are in the checkpoint, as JSON."""
    args = arguments(tmp_path, router, sortedrl_mode=mode)
    first = SortedDataSource(args)
    outputs = rollouts(first, args, router, range(3))
    first.save(2)
    rollouts(first, args, router, range(3, 4))  # lost with the process

    args = arguments(tmp_path, router, sortedrl_mode=mode, load=args.save)
    second = SortedDataSource(args)
    second.load(2)
    outputs += rollouts(second, args, router, range(3, _UPDATES))

    _refuse_lost_or_repeated(outputs)
    _refuse_broken_answers(outputs)
    state = json.loads((tmp_path / "save" / "rollout" / "sortedrl_2" / "state.json").read_text())
    assert state["version"] == 3


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"sortedrl_grup_prompts": 8}, "did you mean 'group_prompts'"),
        ({"sortedrl_group_prompts": 6}, "multiple of --rollout-batch-size"),
        ({"sortedrl_mode": "coupled"}, "verifies cached tokens"),
        ({"use_rollout_logprobs": False}, "--use-rollout-logprobs"),
        ({"sortedrl_mode": "redraw"}, "--sglang-enable-deterministic-inference"),
        ({"dynamic_sampling_filter_path": "mine.f"}, "every prompt is trained"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(tmp_path, router, changed, said):
    """Before anything is generated."""
    with pytest.raises(ConfigError, match=said):
        schedule_for(arguments(tmp_path, router, **changed))


def test_another_data_source_is_refused(tmp_path, router):
    """It could not hold what is interrupted."""
    with pytest.raises(ConfigError, match="--data-source-path"):
        generate_rollout(arguments(tmp_path, router), 0, object())


@pytest.mark.parametrize(
    ("name", "variable", "address"),
    [
        ("rollout", "ROLLOUT_FUNCTION_PATH", "slime_run.contract.generate_rollout"),
        ("path_loading", "DATA_SOURCE_PATH", "sortedrl.integrations.slime.SortedDataSource"),
    ],
)
def test_slimes_own_contract_tests_pass(name, variable, address):
    """With the real transformers and Ray; only `sglang_router` is a stand-in."""
    contracts = Path(SOURCE) / "tests" / "plugin_contracts" / f"test_plugin_{name}_contracts.py"
    program = (
        "import sys, ray, transformers, pytest; "
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', sys.argv[1]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(contracts)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
            f"SLIME_CONTRACT_{variable}": address,
        },
        cwd=SOURCE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
