"""TRL's trainer on our schedule: the laws of the scheduler hold inside TRL too."""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset, IterableDataset
from trl import GRPOConfig, GRPOTrainer

import sortedrl
from sortedrl.cli import main
from sortedrl.config.schedule import Schedule
from sortedrl.core.events import read_events
from sortedrl.core.meter import measure
from sortedrl.engines.native import NativeEngine
from sortedrl.engines.sampling import Sampling
from sortedrl.engines.streaming.backend import BackendLimits, Delta
from sortedrl.engines.streaming.streamed_engine import StreamedEngine
from sortedrl.errors import CheckpointError, ConfigError
from sortedrl.integrations.trl import SortedGRPOTrainer
from sortedrl.integrations.trl.engines import SyncedServer
from sortedrl.integrations.trl.settings import schedule_for
from sortedrl.models.tiny import TinySettings, tiny_model, tiny_tokenizer
from sortedrl.types import Prompt, Trajectory, Weights

ROOT = Path(__file__).parent.parent
ROWS, SAMPLES, BATCH = 12, 2, 4
STOPS = list(range(0, 256, 11))
"""Every eleventh byte ends an answer, so that a model without training writes many lengths."""

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:::{package}")
    for package in ("trl", "transformers", "torch", "accelerate", "peft", "datasets")
]


def model_of():
    model = tiny_model(TinySettings(hidden=16, layers=1, heads=2))
    model.generation_config.eos_token_id = STOPS
    return model


def dataset(rows=ROWS):
    return Dataset.from_list([{"prompt": f"{row}: ", "row": row} for row in range(rows)])


def arguments(folder, **changes):
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "num_generations": SAMPLES,
        "max_completion_length": 24,
        "learning_rate": 0.0,
        "num_train_epochs": 1,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    return GRPOConfig(**(given | changes))


class Answers:
    """A reward that keeps what it is asked to score: one list for each generation batch."""

    __name__ = "answers"

    def __init__(self):
        self.batches = []

    def __call__(self, completions, completion_ids, row, trainer_state, **columns):
        self.batches.append(
            [(number, tuple(ids)) for number, ids in zip(row, completion_ids, strict=True)]
        )
        return [float(sum(ids) % 7) for ids in completion_ids]

    @property
    def all(self):
        return Counter(answer for batch in self.batches for answer in batch)

    @property
    def rows(self):
        return Counter(row for batch in self.batches for row, _ in batch)


class Watched(SortedGRPOTrainer):
    """Compares the engine's log-probabilities with TRL's own, before each update."""

    gaps = ()
    kept = ()

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        with torch.no_grad():
            own, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([output["prompt_ids"], output["completion_ids"]], 1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], 1),
                output["completion_ids"].size(1),
            )
        mask = output["completion_mask"].bool()
        gap = (own - output["sampling_per_token_logps"])[mask].abs().max().item()
        self.gaps = (*self.gaps, gap)
        self.kept = (*self.kept, output.get("old_per_token_logps"))
        return output


def made(folder, schedule, *, kind=SortedGRPOTrainer, slots=3, model=None, peft=None, **changes):
    rows = changes.pop("rows", ROWS)
    evaluated = changes.pop("eval_dataset", None)
    answers = Answers()
    trainer = kind(
        model=model_of() if model is None else model,
        reward_funcs=answers,
        args=arguments(folder, **changes),
        train_dataset=dataset(rows),
        eval_dataset=evaluated,
        processing_class=tiny_tokenizer(),
        peft_config=peft,
        schedule=schedule,
        slots=slots,
    )
    return trainer, answers


def trained(folder, schedule, **changes):
    trainer, answers = made(folder, schedule, **changes)
    trainer.train()
    return trainer, answers


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Two threads on a busy machine wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- two runs in processes of their own, started first and read last ------------------------------

KILLED = """
import os, signal
from pathlib import Path
import torch
torch.set_num_threads(1)
import test_integration_trl as world
trainer, answers = world.made(Path({folder!r}), {schedule!r}, **world.RESUMED)
score = type(answers).__call__
def killing(self, completions, **columns):
    if len(self.batches) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return score(self, completions, **columns)
type(answers).__call__ = killing
trainer.train()
"""
RANKS = """
import json, os
from pathlib import Path
import torch
torch.set_num_threads(1)
import test_integration_trl as world
rank = int(os.environ["RANK"])
# transformers loads the optimiser to "cpu:0" where there are ranks, which torch knows on GPUs only.
torch.serialization.register_package(
    0, lambda storage: None, lambda storage, place: storage if place.startswith("cpu:") else None
)
folder = Path({folder!r})
trainer, answers = world.made(folder, {schedule!r}, learning_rate=1e-2, save_steps=2,
                              save_strategy="steps", ddp_backend="gloo")
trainer.train()
whole = world.weights_of(trainer)
again, others = world.made(folder, {schedule!r}, learning_rate=1e-2, ddp_backend="gloo")
again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
world.assert_same(whole, world.weights_of(again))
assert others.batches == answers.batches[2:]
total = sum(tensor.double().sum().item() for tensor in whole.values())
logs = [row for row in trainer.state.log_history if "sortedrl/goodput" in row]
Path(folder, f"rank-{{rank}}.json").write_text(
    json.dumps([answers.batches, total, len(logs), trainer.state.global_step])
)
"""
RESUMED = {"learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
PARTIAL = {"mode": "partial", "group_prompts": 6, "lookahead": 1}


def free_port():
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def started(code, *, environment=()):
    paths = [str(ROOT / "src"), str(ROOT / "tests")]
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        | dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module", autouse=True)
def processes(tmp_path_factory):
    """A run that is killed, and a run of two ranks, beside the tests of this process."""
    folder = tmp_path_factory.mktemp("processes")
    killed = started(KILLED.format(folder=str(folder / "killed"), schedule=PARTIAL))
    port = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        started(
            RANKS.format(folder=str(folder / "ranks"), schedule={"mode": "coupled"}),
            environment=port | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    yield folder, killed, ranks
    for process in (killed, *ranks):
        process.kill()
        process.communicate()


# --- laws -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("sync"), {"strategy": "sync"})[1]


@pytest.mark.parametrize(
    "schedule",
    [
        {"mode": "coupled"},
        {"mode": "redraw", "group_prompts": 6},
        {"mode": "partial", "lookahead": 1, "group_prompts": 6},
        Schedule(strategy="posthoc", group_prompts=12, update_batch=4),
    ],
    ids=["coupled", "redraw", "partial", "posthoc"],
)
def test_without_learning_every_schedule_trains_on_the_same_answers(
    synchronous, schedule, tmp_path
):
    trainer, answers = trained(tmp_path, schedule)
    assert answers.all == synchronous.all
    assert len({ids for _, ids in answers.all}) > ROWS, "the answers differ from each other"
    assert [len(batch) for batch in answers.batches] == [BATCH] * (ROWS * SAMPLES // BATCH)
    interrupted = [e for e in read_events(tmp_path / "events.jsonl") if e.kind == "interrupt"]
    assert bool(interrupted) == (not trainer.schedule.never_interrupts)


@pytest.mark.parametrize("mode", ["on_policy", "redraw", "partial", "coupled"])
def test_every_row_is_trained_once_per_epoch_in_batches_of_exact_size(mode, tmp_path):
    schedule = {"mode": mode, "group_prompts": 6, "lookahead": int(mode != "redraw")}
    trainer, answers = trained(
        tmp_path,
        schedule,
        learning_rate=1e-2,
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        rows=6,
    )
    assert answers.rows == {row: 2 * SAMPLES for row in range(6)}
    assert [len(batch) for batch in answers.batches] == [BATCH] * 6
    assert trainer.state.global_step == 6
    metrics = measure(read_events(tmp_path / "events.jsonl"))
    ledger = metrics.run.ledger
    assert ledger.decoded == ledger.trained + ledger.discarded
    assert ledger.trained == sum(len(ids) for _, ids in answers.all.elements())
    assert (metrics.run.staleness_max > 0) == (mode == "partial")
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert sum(row["sortedrl/discarded_tokens"] for row in logs) == ledger.discarded
    assert all(0 <= row["sortedrl/bubble"] < 1 for row in logs)
    assert max(row["sortedrl/max_staleness"] for row in logs) == metrics.run.staleness_max


def test_rows_that_fill_no_batch_are_left_at_the_end_of_the_run_only(tmp_path):
    trainer, answers = trained(tmp_path, {"mode": "coupled"}, rows=9, num_train_epochs=2)
    assert trainer.state.global_step == 8, "TRL leaves one row of each epoch out"
    assert sorted(answers.rows.values()) == [SAMPLES] * 2 + [2 * SAMPLES] * 7
    last = list(read_events(tmp_path / "events.jsonl"))[-1]
    assert (last.kind, last.trained) == ("end", 8 * BATCH), "nothing was started in vain"


# --- log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["coupled", "partial"])
def test_the_engine_and_trl_agree_on_log_probabilities(mode, tmp_path):
    schedule = {"mode": mode, "group_prompts": 6}
    trainer, _ = trained(
        tmp_path, schedule, kind=Watched, learning_rate=3e-2, gradient_checkpointing=True
    )
    if mode == "coupled":
        assert max(trainer.gaps) < 1e-4
        assert trainer.kept == (None,) * len(trainer.gaps), "as TRL does where nothing is stale"
    else:
        assert trainer.gaps[0] < 1e-4 < max(trainer.gaps), "later batches hold older tokens"
        assert all(kept is not None for kept in trainer.kept)


class Padded(SortedGRPOTrainer):
    """Passes as TRL makes them: answers at random, all as wide as the longest of the step."""

    _may_regroup = False
    _get_per_token_logps_and_entropies = GRPOTrainer._get_per_token_logps_and_entropies


def widths_of(trainer):
    """Trains, and returns rows and columns of each pass over the model."""
    shapes = []
    forward = GRPOTrainer._get_per_token_logps_and_entropies

    def noting(self, model, input_ids, *given, **more):
        shapes.append((tuple(input_ids.shape), given[0].sum(dim=1).max().item()))
        return forward(self, model, input_ids, *given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", noting)
        if isinstance(trainer, Padded):
            patch.setattr(Padded, "_get_per_token_logps_and_entropies", noting)
        trainer.train()
    return shapes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss_type": "grpo"},
        {"loss_type": "dr_grpo", "pad_to_multiple_of": 8},
        {"loss_type": "bnpo"},
        {"entropy_coef": 0.5},
        {"top_entropy_quantile": 0.5},
        {"loss_type": "cispo", "mask_truncated_completions": True, "max_completion_length": 12},
        {"importance_sampling_level": "sequence", "loss_type": "luspo"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "dapo",
)
def test_shorter_passes_make_the_same_update(changes, tmp_path):
    common = {"max_steps": 1, "gradient_accumulation_steps": 4, "optim": "sgd"} | changes
    own, _ = made(tmp_path / "own", None, learning_rate=1.0, **common)
    before, own_shapes = weights_of(own), widths_of(own)
    plain, _ = made(tmp_path / "trl", None, kind=Padded, learning_rate=1.0, **common)
    plain_shapes = widths_of(plain)
    after, expected = weights_of(own), weights_of(plain)
    assert any((expected[name] - before[name]).abs().max() > 1e-3 for name in before)
    for name in before:
        torch.testing.assert_close(after[name], expected[name], rtol=1e-4, atol=1e-5)
    assert len(own_shapes) == len(plain_shapes) == 4
    multiple = changes.get("pad_to_multiple_of", 1)
    assert all(columns < longest + 2 * multiple for (_, columns), longest in own_shapes)
    cells = [
        sum(rows * columns for (rows, columns), _ in shapes)
        for shapes in (own_shapes, plain_shapes)
    ]
    assert cells[0] < cells[1], "passes are cut to their longest answer"
    depends_on_passes = {"entropy_coef", "top_entropy_quantile"} & changes.keys()
    is_dealt = changes.get("loss_type") != "bnpo" and not depends_on_passes
    widths = [columns for (_, columns), _ in own_shapes]
    assert (widths == sorted(widths, reverse=True)) is is_dealt


def test_log_probabilities_in_passes_are_those_of_one_padded_pass(tmp_path):
    trainer, _ = made(tmp_path, None)
    torch.manual_seed(0)
    ids, mask = torch.randint(1, 255, (7, 13)), torch.ones(7, 13, dtype=torch.long)
    for row, length in enumerate((1, 9, 3, 8, 0, 2, 5)):
        mask[row, 4 + length :] = 0
    given = (trainer.model, ids, mask, 9)
    with torch.no_grad():
        logps, entropies, aux = trainer._get_per_token_logps_and_entropies(
            *given, batch_size=2, compute_entropy=True
        )
        expected, expected_entropies, _ = GRPOTrainer._get_per_token_logps_and_entropies(
            trainer, *given, compute_entropy=True
        )
        without, none, _ = trainer._get_per_token_logps_and_entropies(*given)
    written = mask[:, 4:].bool()
    assert (aux, none) == (None, None)
    for found, right in ((logps, expected), (entropies, expected_entropies), (without, expected)):
        assert found.shape == (7, 9)
        torch.testing.assert_close(found[written], right[written], rtol=1e-4, atol=1e-5)


def test_temperature_and_stop_tokens_are_those_of_trl(tmp_path):
    trainer, answers = trained(tmp_path, None, kind=Watched, temperature=0.7)
    assert trainer.schedule.mode == "partial"
    assert max(trainer.gaps) < 1e-4
    for _, ids in answers.all:
        assert not set(ids[:-1]) & set(trainer.eos_token_ids)
        assert len(ids) == 24 or ids[-1] in trainer.eos_token_ids


def test_conversational_prompts_go_through_the_chat_template(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}>"
    rows = [{"prompt": [{"role": "user", "content": f"{row}?"}], "row": row} for row in range(2)]
    answers = Answers()
    SortedGRPOTrainer(
        model=model_of(),
        reward_funcs=answers,
        args=arguments(tmp_path),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    ).train()
    assert answers.rows == {0: SAMPLES, 1: SAMPLES}
    start = next(e for e in read_events(tmp_path / "events.jsonl") if e.kind == "start")
    assert start.prompt_tokens == len("0?>")


def test_adapters_are_seen_by_the_engine(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5)
    trainer, _ = trained(
        tmp_path,
        {"mode": "coupled"},
        kind=Watched,
        peft=config,
        learning_rate=0.1,
        gradient_checkpointing=True,
        disable_dropout=True,
    )
    assert max(trainer.gaps) < 1e-4
    adapters = [t for name, t in trainer.model.named_parameters() if "lora_B" in name]
    assert adapters
    assert all(tensor.abs().max() > 0.1 for tensor in adapters)


@pytest.mark.parametrize("has_adapters", [False, True])
def test_under_autocast_the_engine_has_a_copy_that_follows(has_adapters, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules="all-linear") if has_adapters else None
    trainer, answers = trained(
        tmp_path,
        {"mode": "coupled"},
        kind=Watched,
        peft=config,
        learning_rate=3e-2,
        bf16=True,
        rows=6,
    )
    assert trainer.model.dtype == torch.float32
    assert max(trainer.gaps) < 0.2
    assert answers.rows == {row: SAMPLES for row in range(6)}


def test_several_passes_over_a_batch(tmp_path):
    trainer, answers = trained(tmp_path, {"mode": "coupled"}, num_iterations=2, learning_rate=1e-2)
    assert trainer.state.global_step == 12
    assert answers.rows == {row: SAMPLES for row in range(ROWS)}, "scored once, trained twice"
    assert measure(read_events(tmp_path / "events.jsonl")).run.updates == 6


# --- evaluation -----------------------------------------------------------------------------------


def test_evaluations_draw_from_the_same_noise_and_leave_the_training_alone(synchronous, tmp_path):
    trainer, answers = made(
        tmp_path,
        {"mode": "partial", "group_prompts": 6},
        eval_dataset=dataset(4),
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=4,
    )
    before = trainer.evaluate()["eval_reward"]
    trainer.train()
    found = [row["eval_reward"] for row in trainer.state.log_history if "eval_reward" in row]
    assert found == [before] * 3, "the weights did not change"
    assert trainer.evaluate()["eval_reward"] == before
    training = Counter(
        {answer: n for answer, n in answers.all.items() if answer in synchronous.all}
    )
    assert synchronous.all <= training


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        ({"mode": "coupled", "group_prompts": 6}, {}),
        ({"strategy": "posthoc", "group_prompts": 12}, {}),
        ({"mode": "coupled"}, {"num_iterations": 2}),
    ],
    ids=["coupled", "posthoc", "passes"],
)
def test_a_resumed_run_ends_with_the_same_answers(schedule, changes, tmp_path):
    changes = {"learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 3, **changes}
    whole, answers = trained(tmp_path, schedule, **changes)
    events = (tmp_path / "events.jsonl").read_text().splitlines()
    resumed, others = made(tmp_path, schedule, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    if "num_iterations" in changes:
        assert others.batches == answers.batches[1:], "the batch that was cut, and the rest"
    else:
        assert others.batches == answers.batches[3:]
        assert_same(weights_of(whole), weights_of(resumed))
    again = (tmp_path / "events.jsonl").read_text().splitlines()
    added = 1 + (resumed.num_iterations > 1)
    assert len(again) == len(events) + added, "that it was resumed, and scored a cut batch again"
    assert measure(read_events(tmp_path / "events.jsonl")).run.ledger.cached == 0


def test_a_finished_run_is_resumed_for_another_epoch(tmp_path):
    changes = {"rows": 4, "save_strategy": "epoch"}
    _, first = trained(tmp_path, {"mode": "coupled"}, **changes)
    trainer, second = made(tmp_path, {"mode": "coupled"}, num_train_epochs=2, **changes)
    trainer.train(resume_from_checkpoint=True)
    assert first.rows == second.rows == {row: SAMPLES for row in range(4)}
    kinds = [event.kind for event in read_events(tmp_path / "events.jsonl")]
    assert (kinds.count("end"), kinds[-1]) == (1, "end")


def test_a_killed_run_resumes_and_loses_nothing(processes, tmp_path):
    folder, killed, _ = processes
    said, _ = killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL, said
    place = folder / "killed"
    newest = max(place.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    assert newest.name == "checkpoint-4"
    (newest / "trainer_state.json").write_text("{")  # as if it was killed while it saved
    resumed, others = made(place, PARTIAL, **RESUMED)
    resumed.train(resume_from_checkpoint=True)
    whole, answers = trained(tmp_path, PARTIAL, **RESUMED)
    assert others.batches == answers.batches[3:]
    assert_same(weights_of(whole), weights_of(resumed))


def test_only_the_same_run_is_resumed(tmp_path):
    schedule = {"mode": "coupled"}
    changes = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trained(tmp_path, schedule, **changes)
    for other, given, message in (
        ({"mode": "partial"}, {}, "schedule was .* is "),
        (schedule, {"rows": 8}, "data was "),
        (schedule, {"seed": 1}, "seed was 42, is 1"),
    ):
        trainer, _ = made(tmp_path, other, **(changes | {"max_steps": 2} | given))
        with pytest.raises(CheckpointError, match=message):
            trainer.train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-1" / "sortedrl" / "rank-0.json").unlink()
    trainer, _ = made(tmp_path, schedule, **(changes | {"max_steps": 2}))
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match="cannot be read"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


# --- several ranks --------------------------------------------------------------------------------


def test_two_ranks_train_every_row_once_and_stay_alike(processes):
    folder, _, ranks = processes
    for process in ranks:
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
    first, second = (
        json.loads((folder / "ranks" / f"rank-{rank}.json").read_text()) for rank in range(2)
    )
    batches = first[0] + second[0]
    assert [len(batch) for batch in batches] == [BATCH] * 6
    assert Counter(row for batch in batches for row, _ in batch) == {
        row: SAMPLES for row in range(ROWS)
    }
    assert first[1] == second[1], "the ranks have the same weights"
    assert first[2:] == [3, 3]
    assert (folder / "ranks" / "events-rank-1.jsonl").exists()


# --- what a run leaves ----------------------------------------------------------------------------


def test_the_report_reads_a_run_of_trl(tmp_path, capsys):
    trained(tmp_path, {"mode": "partial"}, learning_rate=1e-2)
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "sorted/partial" in page
    assert "Mean reward of the answers of an update" in page
    assert main(["trace", str(tmp_path), "--out", str(tmp_path / "trace.json")]) == 0
    capsys.readouterr()


def test_a_second_run_in_the_same_folder_begins_anew(tmp_path):
    for _ in range(2):
        trainer, answers = trained(tmp_path, {"mode": "coupled"}, max_steps=2)
        assert len(answers.batches) == 2
    trainer.train()
    assert len(answers.batches) == 4
    assert [e.kind for e in read_events(tmp_path / "events.jsonl")].count("begin") == 1


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    path = str(ROOT / "examples" / "trl_grpo.py")
    given = ["--out", str(tmp_path / "run"), "--rows", "8", "--tokens", "8", "--epochs", "1"]
    monkeypatch.setattr(sys, "argv", [path, *given])
    threads = torch.get_num_threads()
    runpy.run_path(path, run_name="__main__")
    torch.set_num_threads(threads)
    assert "sortedrl report" in capsys.readouterr().out
    assert (tmp_path / "run" / "events.jsonl").exists()


# --- engines --------------------------------------------------------------------------------------


def test_an_engine_of_ones_own(tmp_path):
    opened = []

    def engine(model):
        opened.append(NativeEngine(model, slots=2, sampling=Sampling(temperature=0.5)))
        return opened[-1]

    answers = Answers()
    SortedGRPOTrainer(
        model=model_of(),
        reward_funcs=answers,
        args=arguments(tmp_path, max_steps=2),
        train_dataset=dataset(),
        processing_class=tiny_tokenizer(),
        engine=engine,
    ).train()
    assert len(opened) == 1
    assert next(iter(read_events(tmp_path / "events.jsonl"))).slots == 2


class Server:
    """The part of a vLLM server that generates: it says 7 and stops."""

    name = "a server"
    limits = BackendLimits(slots=8, context=64, vocabulary=264)

    async def stream(self, request):
        yield Delta(tokens=(5, 7), logprobs=(-1.0, -2.0), end="stop")

    async def abort(self, ids):
        raise AssertionError("nothing runs")

    async def load_weights(self, weights):
        raise AssertionError("TRL sends the weights")

    async def close(self):
        self.name = "closed"


def test_a_server_gets_its_weights_from_trl_and_its_tokens_get_our_versions():
    server = Server()

    async def opening():
        return SyncedServer(server, slots=4)

    engine = StreamedEngine(opening, max_tokens=8, stop_tokens=(7,))
    assert (engine.slots, engine.name) == (4, "a server")
    engine.load_weights(Weights(3))
    engine.submit(
        [Trajectory(prompt=Prompt(id=0, tokens=(1,)), sample_index=0, group=0, seed=0)],
        tolerance=None,
    )
    (answer,) = engine.step().finished
    assert (answer.tokens, answer.segments[0].version) == ([5, 7], 3)
    engine.close()
    assert server.name == "closed"


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "given", "message"),
    [
        ({"mode": "partial"}, {"num_iterations": 2}, "num_iterations must be 1 where"),
        ({}, {"top_k": 5}, "top_k, top_p and min_p must be off"),
        (None, {"steps_per_generation": 2}, "must equal gradient_accumulation_steps, got 2 and 1"),
        (None, {"generation_batch_size": 8}, "must equal gradient_accumulation_steps, got 2 and 1"),
        (None, {"use_vllm": True, "vllm_mode": "colocate"}, "set vllm_mode='server'"),
        ({"mode": "coupled"}, {"use_vllm": True, "vllm_mode": "server"}, "needs the native engine"),
        ({"mode": "redraw"}, {"use_vllm": True, "vllm_mode": "server"}, "needs the native engine"),
        (None, {"repetition_penalty": 1.1}, "repetition_penalty must be 1.0, got 1.1"),
        (None, {"generation_kwargs": {"seed": 1}}, "generation_kwargs must be None"),
        ({"group_prompts": 3}, {}, "a multiple of the 2 prompts of one generation batch, got 3"),
        ({"update_batch": 4}, {}, "schedule.update_batch follows from the GRPOConfig"),
        ({"mod": "coupled"}, {}, "did you mean 'mode'"),
        ({"mode": "cupled"}, {}, "coupled"),
        ("coupled", {}, "must be a Schedule or a mapping of its fields, .* got 'coupled'"),
        (None, {"temperature": 0.0}, "temperature must be above 0, .* set top_k to 1"),
        ({"strategy": "sync", "lookahead": 1}, {}, "lookahead needs strategy 'sorted'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(schedule, given, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        SortedGRPOTrainer(
            model="no such model",
            args=arguments(tmp_path, **given),
            train_dataset=dataset(),
            schedule=schedule,
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rollout_func": len}, "leave rollout_func out"),
        ({"train_dataset": None}, "must be a datasets.Dataset"),
        ({"train_dataset": dataset().rename_column("prompt", "q")}, "a column 'prompt', got q"),
        ({"slots": 4, "engine": NativeEngine}, "leave slots out, got 4"),
        ({"slots": 0}, "slots must be at least 1, got 0"),
        ({"engine": "native"}, "must be a function that makes an engine .* got 'native'; leave it"),
        (
            {"train_dataset": IterableDataset.from_generator(lambda: iter([]))},
            "load it without streaming",
        ),
    ],
)
def test_what_another_part_of_trl_would_do_is_refused(given, message, tmp_path):
    given = {"train_dataset": dataset(), **given}
    with pytest.raises(ConfigError, match=message):
        SortedGRPOTrainer(model="no such model", args=arguments(tmp_path), **given)


def test_two_engines_are_refused(tmp_path):
    args = arguments(tmp_path, use_vllm=True, vllm_mode="server")
    with pytest.raises(ConfigError, match="leave one of them out"):
        SortedGRPOTrainer(
            model="no such model", args=args, train_dataset=dataset(), engine=NativeEngine
        )


def test_every_rank_needs_whole_prompts(tmp_path):
    args = arguments(tmp_path, per_device_train_batch_size=6, num_generations=3)
    assert schedule_for({"group_prompts": 8}, args, world=1).update_batch == 6
    assert schedule_for(None, args, world=2) == Schedule(
        group_prompts=4, samples_per_prompt=3, update_batch=3, harvest_unit="prompt", exact=True
    )
    args = arguments(tmp_path, per_device_train_batch_size=6, num_generations=2)
    with pytest.raises(ConfigError, match="each of the 2 processes needs whole prompts"):
        schedule_for(None, args, world=2)


def test_trls_own_trainer_is_measured_without_changing_what_it_learns(tmp_path, capsys):
    """The reward that gives nothing: `sortedrl compare` says what a schedule would bring."""
    lengths, answers = tmp_path / "lengths.jsonl", Answers()
    trainer = GRPOTrainer(
        model=model_of(),
        processing_class=tiny_tokenizer(),
        reward_funcs=[answers, sortedrl.measure(lengths)],
        args=arguments(tmp_path / "out", per_device_train_batch_size=8, num_generations=4),
        train_dataset=dataset(),
    )
    trainer.train()

    noted = [json.loads(line) for line in lengths.read_text().splitlines()]
    given = [len(ids) for batch in answers.batches for _, ids in batch]
    assert [row["tokens"] for row in noted] == given
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    own = [row["rewards/answers/mean"] for row in trainer.state.log_history if "reward" in row]
    assert rewards == own
    capsys.readouterr()
    assert main(["compare", str(lengths), "--strategies", "sorted"]) == 0
    out, err = capsys.readouterr()
    assert "steps of 8 answers, 4 per prompt" in err
    assert "x the tokens of sync per second of rollout" in out
