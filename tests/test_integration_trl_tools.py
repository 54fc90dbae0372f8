"""Tools in TRL's trainer: conversations on our schedule are those of TRL's own loop."""

import asyncio
import threading
import time
from collections import Counter

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen2_5_chat_template

from sortedrl.core.events import read_events
from sortedrl.core.meter import measure
from sortedrl.errors import ConfigError, EnvironmentFailed
from sortedrl.integrations.trl import SortedGRPOTrainer
from sortedrl.integrations.trl.conversations import ToolConversations, ToolRules
from sortedrl.models.tiny import tiny_tokenizer
from sortedrl.types import Prompt, Trajectory

ROWS, SAMPLES, BATCH, TOKENS = 8, 2, 4, 400
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:::{package}")
    for package in ("trl", "transformers", "torch", "accelerate", "peft", "datasets")
] + [pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")]


def call(name, **arguments):
    given = ", ".join(f'"{key}": {value}' for key, value in arguments.items())
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{{given}}}}}\n</tool_call>'


CALLS = [
    call("add", number=1),
    call("add", number=5),
    call("show"),
    call("fail", number=3),
    call("nothing"),
    call("add", wrong=1),
]


def tokenizer_of():
    """Bytes, marks of the template, and whole calls as tokens, so that any model makes calls."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.add_tokens(CALLS)
    tokenizer.chat_template = qwen2_5_chat_template
    return tokenizer


def model_of(tokenizer, *, seed=1):
    """A random model that likes to make calls and to end its turns."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            initializer_range=1.0,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    with torch.no_grad():
        for token in (tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(CALLS)):
            is_end = token == tokenizer.eos_token_id
            model.lm_head.weight[token] *= 6.0 if is_end else 3.0
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


class Counting:
    """An environment in TRL's form: a number that calls change."""

    is_replayable = True

    def __init__(self):
        self.users = 0

    def reset(self, start=0, **row):
        self.value, self.log = start, []
        return f" Begin at {start}."

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: What to add.
        """
        assert self.users == 0, "two calls at the same time"
        self.users += 1
        time.sleep(0.002 * (self.value % 3))
        self.users -= 1
        self.value += number
        self.log.append(number)
        return f"now {self.value}"

    def show(self) -> int:
        """Show the number."""
        return self.value

    def fail(self, number: int) -> str:
        """Fail.

        Args:
            number: Anything.
        """
        raise RuntimeError(f"out of order at {number}")

    def get_reward(self) -> float:
        return float(self.value % 7)


class Once(Counting):
    is_replayable = False


class Deaf(Counting):
    """Another one for mixed tasks."""

    def get_reward(self) -> float:
        return -1.0


class Answers:
    """A reward that keeps the conversations it scores, and looks at their environments."""

    __name__ = "answers"

    def __init__(self):
        self.all = Counter()
        self.rewards = []

    def __call__(self, prompts, completions, completion_ids, row, environments=None, **columns):
        found = []
        for place, number in enumerate(row):
            said = [
                (m["role"], str(m.get("content")), str(m.get("tool_calls")))
                for m in completions[place]
            ]
            value = None if environments is None else environments[place].value
            self.all[number, tuple(completion_ids[place]), tuple(said), value] += 1
            found.append(float(len(completion_ids[place]) % 5))
        self.rewards += found
        return found


class Watched(SortedGRPOTrainer):
    """Compares the engine's log-probabilities of written tokens with TRL's own."""

    gaps = ()
    masked = 0

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        with torch.no_grad():
            own, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([output["prompt_ids"], output["completion_ids"]], 1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], 1),
                output["completion_ids"].size(1),
            )
        mask = output["completion_mask"].bool() & output["tool_mask"].bool()
        gap = (own - output["sampling_per_token_logps"])[mask].abs().max().item()
        self.gaps = (*self.gaps, gap)
        self.masked += int((output["completion_mask"].bool() & ~output["tool_mask"].bool()).sum())
        return output


def made(folder, schedule=None, *, kind=SortedGRPOTrainer, factory=Counting, **changes):
    tokenizer, answers = tokenizer_of(), Answers()
    ours = {} if kind is GRPOTrainer else {"schedule": schedule, "slots": 3}
    ours |= changes.pop("ours", {})
    without = changes.pop("without", [])
    model = model_of(tokenizer, seed=changes.pop("seed", 1))
    rows = [
        {"prompt": [{"role": "user", "content": f"{n}:"}], "row": n, "start": 10 * n}
        for n in range(ROWS)
    ]
    if isinstance(factory, dict):
        rows = [row | {"environment": list(factory)[row["row"] % len(factory)]} for row in rows]
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "num_generations": SAMPLES,
        "max_completion_length": TOKENS,
        "max_tool_calling_iterations": 4,
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
    trainer = kind(
        model=model,
        reward_funcs=answers,
        args=GRPOConfig(**(given | changes)),
        train_dataset=Dataset.from_list(rows).remove_columns(without),
        processing_class=tokenizer,
        tools=ours.pop("tools", None),
        environment_factory=factory,
        **ours,
    )
    return trainer, answers


def trained(folder, schedule=None, **changes):
    trainer, answers = made(folder, schedule, **changes)
    trainer.train()
    return trainer, answers


def turns_of(answers):
    return [sum(role == "tool" for role, _, _ in said) for _, _, said, _ in answers.all]


@pytest.mark.parametrize(
    ("factory", "seed"),
    [(Counting, 1), ({"one": Counting, "two": Deaf}, 1), (Counting, 0)],
    ids=["one environment", "two environments", "replies that do not fit"],
)
def test_greedy_conversations_are_those_of_trls_own_loop(tmp_path, factory, seed):
    """Conversations, tool messages, states of the environments and rewards, all of them."""
    greedy = {"top_k": 1, "factory": factory, "seed": seed}
    trl, reference = trained(tmp_path / "trl", kind=GRPOTrainer, **greedy)
    assert sum(reference.all.values()) == ROWS * SAMPLES
    assert max(turns_of(reference)) >= 1
    assert {role for key in reference.all for role, _, _ in key[2]} == {"assistant", "tool"}

    def means(trainer):
        keys = ("tools/call_frequency", "reward", "completions/mean_length")
        rows = [row for row in trainer.state.log_history if "reward" in row]
        return [sum(row[key] for row in rows) / len(rows) for key in keys]

    for mode in ("coupled", "redraw", "on_policy"):
        ours, answers = trained(tmp_path / mode, {"mode": mode}, **greedy)
        assert answers.all == reference.all
        assert means(ours) == pytest.approx(means(trl))


def test_with_frozen_weights_all_modes_train_on_the_same_conversations(tmp_path):
    _, reference = trained(tmp_path / "sync", {"strategy": "sync"})
    assert sum(reference.all.values()) == ROWS * SAMPLES
    assert len(set(turns_of(reference))) >= 3
    for mode in ("partial", "coupled", "redraw"):
        _, answers = trained(tmp_path / mode, {"mode": mode})
        assert answers.all == reference.all


@pytest.mark.parametrize("mode", ["partial", "coupled", "on_policy"])
def test_log_probabilities_are_trls_own_and_tool_tokens_are_masked(tmp_path, mode):
    trainer, _ = trained(tmp_path, {"mode": mode}, kind=Watched, learning_rate=1e-2)
    is_stale = mode == "partial"
    assert max(trainer.gaps[: 1 if is_stale else None]) < 1e-4
    assert trainer.masked > 0
    log = list(read_events(tmp_path / "events.jsonl"))
    ledger = measure(log).run.ledger
    assert ledger.decoded == ledger.trained + ledger.discarded
    assert any(event.kind == "reply" for event in log)


def test_tools_without_an_environment_work_too(tmp_path):
    def add(number: int) -> str:
        """Add one.

        Args:
            number: A number.
        """
        return str(number + 1)

    async def show() -> str:
        """Show something, later."""
        await asyncio.sleep(0.001)
        return "shown"

    greedy = {"top_k": 1, "factory": None, "ours": {"tools": [add, show]}}
    _, reference = trained(tmp_path / "trl", kind=GRPOTrainer, **greedy)
    greedy["ours"] = {"tools": [add, show], "is_replayable": True}
    _, answers = trained(tmp_path / "ours", {"mode": "coupled"}, **greedy)
    assert answers.all == reference.all


def test_a_conversation_waits_for_its_own_tool_only(tmp_path):
    """The first call waits until another conversation's tool was called."""
    callers, is_served, alone = [], threading.Event(), []

    class Waiting(Counting):
        def add(self, number: int) -> str:
            """Add a number.

            Args:
                number: What to add.
            """
            callers.append(self)
            if len(callers) == 1:
                alone.append(not is_served.wait(120))
            elif self is not callers[0]:
                is_served.set()
            return super().add(number)

    _, answers = trained(tmp_path, {"mode": "partial"}, factory=Waiting)
    assert alone == [False], "nobody else was served while this tool waited"
    assert sum(answers.all.values()) == ROWS * SAMPLES


class Stop(Exception):
    """The process is gone."""


class Killed(SortedGRPOTrainer):
    """Ends after the second checkpoint."""

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        if self.state.global_step == 2:
            raise Stop


@pytest.mark.parametrize("mode", ["partial", "coupled"])
def test_a_resumed_run_trains_every_conversation_once(tmp_path, mode):
    """Which tool ends first depends on the machine, so the batches may differ."""
    saves = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2}
    cut, _ = made(tmp_path, {"mode": mode}, kind=Killed, **saves)
    with pytest.raises(Stop):
        cut.train()
    again, _ = made(tmp_path, {"mode": mode}, **saves)
    again.train(resume_from_checkpoint=True)
    log = list(read_events(tmp_path / "events.jsonl"))
    assert sum(event.kind == "resume" for event in log) == 1
    trained = [t[:2] for event in log if event.kind == "update" for t in event.trained]
    assert len(trained) == len(set(trained)) == ROWS * SAMPLES
    ledger = measure(log).run.ledger
    assert ledger.decoded == ledger.trained + ledger.discarded


def test_conversations_that_cannot_be_held_again_are_not_resumed(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 1, "factory": Once}
    cut, _ = made(tmp_path, {"mode": "partial"}, kind=Killed, **saves)
    with pytest.raises(Stop):
        cut.train()
    again, _ = made(tmp_path, {"mode": "partial"}, **saves)
    with pytest.raises(ConfigError, match="whose environments are gone"):
        again.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(("limit", "ending"), [(5, None), (4, "stop")])
def test_a_reply_that_leaves_no_room_for_a_token_ends_the_conversation(limit, ending):
    """The engine would give the turn back as it was; asked again and again, nothing would end."""
    rules = ToolRules(
        parse=lambda turn, before, name: {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": "show", "arguments": {}}}],
        },
        suffix=lambda messages: [7, 7],
        run_async=asyncio.run,
        max_iterations=9,
        max_response_tokens=limit,
        max_context=100,
        stop_tokens=frozenset({2}),
    )
    talks = ToolConversations(
        rules,
        factories={None: Counting},
        tools=(),
        row_of=lambda prompt: {"start": 3},
        threads=1,
        limit=None,
        is_replayable=True,
    )
    fresh = Trajectory(prompt=Prompt(id=0, tokens=(1,)), sample_index=0, group=0, seed=0)
    talks.submit(fresh.extended([5, 2], [-0.5, -0.5], version=0))
    (replied,) = talks.collect(wait=True)
    assert replied.finish_reason == ending
    assert list(replied.given) == ([] if ending else [7, 7])
    talks.close()


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is_replayable = True on their classes"):
        made(tmp_path / "a", {"mode": "coupled"}, factory=Once)
    made(tmp_path / "b", {"mode": "coupled", "strategy": "sync"}, factory=Once)
    _, answers = trained(tmp_path / "c", {"mode": "partial"}, factory=Once)
    assert sum(answers.all.values()) == ROWS * SAMPLES

    class Random(Counting):
        numbers = iter(range(1000))

        def reset(self, start=0, **row):
            super().reset(start=start)
            return f" {next(self.numbers)}"

    with pytest.raises(ConfigError, match="reset"):
        trained(tmp_path / "d", {"mode": "partial"}, factory=Random)

    class Broken(Counting):
        def reset(self, start=0, **row):
            if threading.current_thread() is not threading.main_thread():
                raise RuntimeError("the reset failed")
            return super().reset(start=start)

    with pytest.raises(EnvironmentFailed, match="the reset failed"):
        trained(tmp_path / "e", {"mode": "partial"}, factory=Broken)


def test_rows_without_prompts_get_theirs_from_their_environments(tmp_path):
    _, answers = trained(tmp_path, {"mode": "partial"}, without=["prompt"])
    assert sum(answers.all.values()) == ROWS * SAMPLES
    with pytest.raises(ConfigError, match="a column 'prompt', got row, start"):
        made(tmp_path, factory=None, without=["prompt"])


def test_an_evaluation_holds_conversations(tmp_path):
    trainer, answers = made(tmp_path, {"mode": "partial"})
    trainer.args.per_device_eval_batch_size = 2 * ROWS  # more than are probed for their length
    metrics = trainer.evaluate(trainer.train_dataset)
    assert metrics["eval_tools/call_frequency"] > 0
    assert max(turns_of(answers)) >= 1
