"""Environments: rendering, tool calls, foreign objects, and a pool of workers that may fail."""

from dataclasses import replace
from functools import cache
from typing import Literal

import pytest

import environment_objects as objects
from sortedrl.config.data import EnvironmentSettings
from sortedrl.environments.adapters import (
    ToolCall,
    adapted,
    call_tool,
    made,
    schema_of,
    tool_calls,
    tools_of,
)
from sortedrl.environments.builtin import Calculator, Questions
from sortedrl.environments.pool import EnvironmentPool, EnvironmentScorer
from sortedrl.environments.rendering import Renderer
from sortedrl.errors import ConfigError, EnvironmentFailed
from sortedrl.models.tiny import tiny_tokenizer
from sortedrl.rewards.functions import RewardSource
from sortedrl.types import Prompt, Segment, Trajectory

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not "
    "loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLACE = "environment_objects"


@cache
def tokenizer():
    return tiny_tokenizer()


def chat_tokenizer(template=CHAT):
    found = tiny_tokenizer()
    found.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    found.chat_template = template
    return found


def begun(prompt=0, sample=0, **fields):
    return Trajectory(
        prompt=Prompt(id=prompt, tokens=(1, 2), fields={"prompt": "?", "start": 0, **fields}),
        sample_index=sample,
        group=0,
        seed=prompt,
    )


def write(trajectory, text, *, version=0):
    """The policy writes a turn."""
    tokens = (*tokenizer().encode(text), tokenizer().eos_token_id)
    turn = Segment(tokens, (-0.5,) * len(tokens), version, tuple(trajectory.given))
    return replace(trajectory, segments=(*trajectory.segments, turn), given=())


def pool_of(name="Adding", **settings):
    options = {"name": name, "processes": 1, "reply_seconds": 20.0} | settings
    renderer = Renderer(tokenizer(), chat="auto")
    source = RewardSource(f"{PLACE}:{name}")
    return EnvironmentPool(source, EnvironmentSettings(**options), renderer=renderer)


def answer(pool, trajectory):
    pool.submit(trajectory)
    (replied,) = pool.collect(wait=True)
    return replied


def text_of(tokens):
    return tokenizer().decode(list(tokens))


def test_a_conversation_is_answered_turn_by_turn():
    with pool_of(processes=2) as pool:
        conversation = begun()
        for text, reply in (("ab", "=2;"), ("cde", "=5;"), ("f", "=6;")):
            conversation = answer(pool, write(conversation, text))
            assert text_of(conversation.given) == reply
            assert conversation.finish_reason is None
        done = answer(pool, write(conversation, "done"))
        assert (done.finish_reason, done.reward, done.reward_parts) == ("stop", 6, {"total": 6.0})
        assert pool.stats.replayed_turns == 0


def test_conversations_that_were_cut_back_are_replayed():
    with pool_of() as pool:
        first = answer(pool, write(begun(), "ab"))
        second = answer(pool, write(first, "cde"))
        assert text_of(second.given) == "=5;"
        other = answer(pool, write(first, "x"))
        assert text_of(other.given) == "=3;"
        assert pool.stats.replayed_turns == 1
        assert text_of(answer(pool, write(begun(), "z")).given) == "=1;"
        assert text_of(answer(pool, write(begun(), "z")).given) == "=1;"
    with pool_of() as fresh:
        assert text_of(answer(fresh, write(second, "f")).given) == "=6;"
        assert fresh.stats.replayed_turns == 2


def test_an_environment_that_cannot_be_replayed_ends_a_conversation_that_lost_it():
    with pool_of("Forgetful") as pool:
        first = answer(pool, write(begun(), "ab"))
        second = answer(pool, write(first, "c"))
        assert text_of(second.given) == "=3;"
        cut = answer(pool, write(first, "x"))
        assert cut.finish_reason == "length"
        assert pool.stats.failures == {"lost": 1}
        assert text_of(answer(pool, write(begun(), "new")).given) == "=3;"


def test_a_conversation_whose_replay_differs_is_cut_off(caplog):
    with pool_of("Lying") as pool:
        first = answer(pool, write(begun(), "a"))
        second = answer(pool, write(first, "b"))
        pool.cancel(second)
        cut = answer(pool, write(second, "c"))
        assert cut.finish_reason == "length"
        assert pool.stats.failures == {"differs": 1}
    assert "another reply to turn 1" in caplog.text


@pytest.mark.parametrize("trouble", ["hang", "die"])
@pytest.mark.parametrize("policy", ["tell", "end", "skip"])
def test_an_environment_that_fails_loses_no_conversation(trouble, policy):
    with pool_of(on_timeout=policy, reply_seconds=1.0) as pool:
        healthy = answer(pool, write(begun(1), "abc"))
        before = answer(pool, write(begun(), "ab"))
        failed = answer(pool, write(before, trouble))
        scorer = EnvironmentScorer(pool, None)
        if policy == "tell":
            assert text_of(failed.given).startswith("Error: ")
            after = answer(pool, write(failed, "cde"))
            assert text_of(after.given) == "=5;"
        else:
            assert failed.finish_reason == "length"
            (scored,) = scorer.collect([failed])
            assert scored.reward == (2.0 if policy == "end" else None)
        # The other conversation of that worker is replayed.
        assert text_of(answer(pool, write(healthy, "d")).given) == "=4;"


def test_many_conversations_come_back_once_while_some_hang():
    with pool_of(processes=2, reply_seconds=1.0) as pool:
        for prompt in range(12):
            pool.submit(write(begun(prompt), "hang" if prompt % 6 == 5 else "ab"))
        pool.cancel(begun(3))
        found = {}
        while len(found) < 11:
            for replied in pool.collect(wait=True):
                assert replied.key not in found
                found[replied.key] = text_of(replied.given)
        assert pool.collect(wait=False) == []
        assert (3, 0) not in found
        assert sum(text == "=2;" for text in found.values()) == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [("raise", "RuntimeError: the environment is broken"), ("empty", "needs a message")],
)
def test_an_environment_that_is_wrong_stops_the_run_with_its_traceback(text, message):
    with pool_of() as pool:
        pool.submit(write(begun(4), text))
        with pytest.raises(EnvironmentFailed, match=message) as caught:
            pool.collect(wait=True)
        assert "prompt 4" in str(caught.value)


def test_a_conversation_ends_at_the_most_turns():
    with pool_of(max_turns=2) as pool:
        first = answer(pool, write(begun(), "ab"))
        last = answer(pool, write(first, "c"))
        assert (last.finish_reason, last.reward) == ("length", 3.0)


def test_a_conversation_cut_off_in_a_turn_earns_what_its_last_reply_said():
    with pool_of() as pool:
        first = answer(pool, write(begun(), "abc"))
        cut = replace(write(first, "in the middle"), finish_reason="length")
        at_once = replace(write(begun(2), "nothing yet"), finish_reason="length")
        scored = EnvironmentScorer(pool, None).collect([cut, at_once])
        assert [t.reward for t in scored] == [3.0, 0.0]


def test_rows_are_opened_in_order_and_say_whether_they_can_be_replayed():
    rows = [{"prompt": "?", "start": start} for start in range(40)]
    with pool_of(processes=2) as pool:
        openings = pool.open_rows(rows)
        assert [o.messages[0]["content"] for o in openings] == [
            f"Count from {start}. " for start in range(40)
        ]
        assert pool.is_replayable
    with pool_of("Forgetful") as pool:
        pool.open_rows(rows[:1])
        assert not pool.is_replayable


def test_what_cannot_be_loaded_is_named():
    with (
        pool_of("Nothing") as pool,
        pytest.raises(ConfigError, match="unknown class or function 'Nothing'"),
    ):
        pool.open_rows([{"prompt": "?"}])


def test_objects_with_tools_are_environments():
    environment = made(objects.Calculator, {})
    opening = environment.open({"prompt": "Reach 10.", "start": 4})
    assert opening.messages[0]["content"] == "Reach 10. The display shows 4."
    names = [tool["function"]["name"] for tool in opening.tools]
    assert names == ["add", "circle", "crash", "show", "unable"]
    call = '<tool_call>\n{"name": "add", "arguments": {"number": 3, "times": 2}}\n</tool_call>'
    reply = environment.reply({"role": "assistant", "content": f"Hm.\n{call}"})
    assert reply.messages[0]["content"] == "The display shows 10."
    assert (reply.messages[0]["role"], reply.is_done, reply.reward) == ("tool", False, 1.0)
    two = environment.reply({"role": "assistant", "content": call + call})
    assert [m["content"] for m in two.messages] == [f"The display shows {n}." for n in (16, 22)]
    later = environment.reply({"role": "assistant", "content": call.replace("add", "show")})
    assert "unexpected keyword" in later.messages[0]["content"]
    call = '<tool_call>{"name": "show"}</tool_call>'
    assert environment.reply({"content": call}).messages[0]["content"] == "22", "a coroutine"
    assert environment.reply({"role": "assistant", "content": "That is all."}).is_done
    with pytest.raises(ConfigError, match="no display"):
        environment.reply({"content": call.replace("show", "unable")})


def test_rewards_and_resets_may_be_coroutines():
    class Later(objects.Calculator):
        async def reset(self, **row):
            self.value = 10
            return " Later."

        async def get_reward(self):
            return 0.5

    environment = adapted(Later())
    assert environment.open({"prompt": "Now."}).messages[0]["content"] == "Now. Later."
    assert environment.reply({"content": "Done."}).reward == 0.5


def test_an_environment_that_cannot_be_closed_harms_no_conversation():
    with pool_of("Stuck", reply_seconds=1.0) as pool:
        other = answer(pool, write(begun(2), "ab"))
        done = answer(pool, write(begun(), "done"))
        assert (done.finish_reason, done.reward) == ("stop", 0)
        pool.cancel(answer(pool, write(begun(3), "x")))
        assert text_of(answer(pool, write(other, "c")).given) == "=3;"
        assert (pool.stats.failures, pool.stats.workers_killed) == ({}, 2)


def test_a_reset_gets_the_columns_that_it_names():
    class Narrow(objects.Calculator):
        def reset(self, start):
            self.value = start

    opening = adapted(Narrow()).open({"prompt": "Reach 10.", "start": 4, "place": "rows:1"})
    assert opening.messages[0]["content"] == "Reach 10."


def test_an_openenv_client_is_heard_through_a_wrapper():
    wrapped = adapted(objects.WrappedClient())
    assert "Say something." in wrapped.open({"prompt": "Hello"}).messages[-1]["content"]
    first = wrapped.reply({"role": "assistant", "content": "hi"})
    assert (first.messages[0]["content"], first.is_done, first.reward) == ("You said hi.", False, 1)
    last = wrapped.reply({"role": "assistant", "content": "bye"})
    assert (last.is_done, last.reward) == (True, 2.0)
    assert not wrapped.is_replayable
    with pytest.raises(ConfigError, match="must be text or messages, got dict"):
        adapted(objects.OpenEnvClient()).open({"prompt": "Hello"})


def test_an_environment_of_skyrl_gym_plays_a_whole_episode():
    """Runs where skyrl-gym is installed; docs/how-to/environments.md says with which version."""
    skyrl_gym = pytest.importorskip("skyrl_gym")

    def make(row):
        extras = {"reward_spec": {"ground_truth": row["answer"]}, "max_turns": 3}
        return skyrl_gym.make("gsm8k_multi_turn", extras=extras)

    row = {"prompt": [{"role": "user", "content": "6 * 7?"}], "answer": "42"}
    environment = made(make, row)
    assert environment.open(row).messages == row["prompt"]
    first = environment.reply({"role": "assistant", "content": "It is 41. #### 41"})
    assert not first.is_done
    assert "#### ANSWER" in first.messages[0]["content"]
    last = environment.reply({"role": "assistant", "content": "#### 42"})
    assert last.is_done
    assert last.reward == pytest.approx(1 + 0.2 / 3)
    environment.close()


def test_gym_and_step_environments_are_environments():
    gym = adapted(objects.Gym())
    assert "Guess a digit." in gym.open({"prompt": "Play."}).messages[0]["content"]
    wrong = gym.reply({"role": "assistant", "content": "1"})
    assert (wrong.messages[0]["content"], wrong.is_done) == ("Wrong.", False)
    right = gym.reply({"role": "assistant", "content": "3"})
    assert (right.is_done, right.reward, gym.is_replayable) == (True, 1.0, False)
    sky = made(objects.sky_gym, {"prompt": "6 * 7?", "answer": "42"})
    assert sky.open({"prompt": "6 * 7?"}).messages[0]["content"] == "6 * 7?"
    assert sky.reply({"role": "assistant", "content": "41"}).messages[0]["content"] == "Try again."
    done = sky.reply({"role": "assistant", "content": "42"})
    assert (done.is_done, done.reward) == (True, 1.0)
    with pytest.raises(ConfigError, match="must have the methods"):
        adapted(object())


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("No call.", []),
        ('{"name": "add", "parameters": {"number": 1}}', [ToolCall("add", {"number": 1})]),
        ('<|python_tag|>{"name": "add", "parameters": {}}', [ToolCall("add", {})]),
        ('<tool_call>{"name": "add"}</tool_call>', [ToolCall("add", {})]),
        ('<tool_call>{"name": "add", "arguments": "{}"}', [ToolCall("add", {})]),
    ],
)
def test_calls_of_both_formats_are_read(text, calls):
    assert tool_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>{name: add}</tool_call>", "not valid JSON"),
        ("<tool_call>[1]</tool_call>", "must be an object"),
        ('<tool_call>{"name": "add", "arguments": 3}</tool_call>', "must be an object"),
        ('<tool_call>{"name": "substract", "arguments": {}}</tool_call>', "unknown tool"),
        ('<tool_call>{"name": "add", "arguments": {"many": 1}}</tool_call>', "add("),
        ('<tool_call>{"name": "crash", "arguments": {}}</tool_call>', "ValueError: out of order"),
        ('<tool_call>{"name": "circle", "arguments": {}}</tool_call>', "Circular reference"),
        pytest.param("<tool_call>" + "[" * 100_000, "not valid JSON", id="nested"),
        pytest.param(
            '<tool_call>{"name": "add", "arguments": "' + "[" * 100_000 + '"}', "object", id="inner"
        ),
    ],
)
def test_a_malformed_call_goes_back_to_the_policy(text, error):
    tools = tools_of(objects.Calculator(), without=("reset", "get_reward"))
    (result,) = [call_tool(tools, call) for call in tool_calls(text)]
    assert result.startswith("Error: ")
    assert error in result


def test_schemas_come_from_annotations_and_docstrings():
    schema = schema_of(objects.Calculator().add)["function"]
    assert schema["description"] == "Add a number to the display."
    assert schema["parameters"]["required"] == ["number"]
    assert schema["parameters"]["properties"]["times"] == {
        "type": "integer",
        "description": "How often.",
    }


def test_schemas_are_those_of_transformers():
    def book(days: list[int], city: str | None, how: Literal["air", "rail"], more: dict[str, int]):
        """Book a journey.

        Args:
            days: Which days,
                counted from now.
            city: Where to.
            how: By what.
            more: What else.

        Returns:
            A ticket.
        """

    def wait(minutes: float = 1.0):
        """Wait.

        Args:
            minutes: How long.
        """

    for tool in (book, wait):
        assert schema_of(tool) == pytest.importorskip("transformers").utils.get_json_schema(tool)


def test_a_reply_is_what_the_template_adds_after_the_turn():
    chat = chat_tokenizer()
    renderer = Renderer(chat, chat="auto")
    end = chat.convert_tokens_to_ids("<|im_end|>")
    messages = [{"role": "tool", "content": "7"}]
    given = renderer.reply(messages, last_token=end)
    assert chat.decode(given) == "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    turn = [*chat.encode("So 3+4: "), end]
    question = [{"role": "user", "content": "3+4?"}]
    prompt = chat.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    history = [*question, {"role": "assistant", "content": "So 3+4: "}, *messages]
    whole = chat.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
    assert prompt + chat.decode([*turn, *given]) == whole
    assert chat.decode(renderer.reply(messages, last_token=5)).startswith("<|im_end|>\n")
    assert renderer.text(turn) == "So 3+4: "


def test_a_template_that_rewrites_history_is_refused():
    renderer = Renderer(chat_tokenizer(REWRITING), chat="auto")
    with pytest.raises(ConfigError, match="changes earlier turns"):
        renderer.check("user")
    Renderer(chat_tokenizer(REWRITING), chat="off").check("user")


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ("{% if false %}{{ m.content }}{% endif %}", "leaves replies of the role tool out"),
        ("{% if loop.index == 3 %}First: {% endif %}{{ m.content }}", "second reply of the role"),
        ("{% if loop.index > 3 %}{{ raise_exception('no more') }}{% endif %}{{ m.content }}", "no"),
    ],
)
def test_a_template_that_does_not_show_every_reply_alike_is_refused(reply, error):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}"
        + reply
        + "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    renderer = Renderer(chat_tokenizer(template), chat="auto")
    renderer.check("user")
    with pytest.raises(ConfigError, match=error):
        renderer.check("tool")


def test_without_a_template_a_reply_is_appended_as_it_is():
    renderer = Renderer(tokenizer(), chat="auto")
    given = renderer.reply([{"role": "user", "content": "=4;"}], last_token=None)
    assert tokenizer().decode(given) == "=4;"


def test_knights_are_asked_and_decided_on():
    environment = Questions(questions=2, cost=0.25)
    statements = "(('lying', 1), ('telling-truth', 0))"
    with pytest.raises(ValueError, match="unpack"):
        environment.open({"prompt": "?", "statements": statements})
    # A says that B lies, B says that both lie: A is a knight, B a knave.
    statements = "(('lying', 1), ('and', ('lying', 0), ('lying', 1)))"
    row = {"prompt": "A:b;B:a&b?", "statements": statements}
    assert environment.open(row).messages[0]["content"] == "A:b;B:a&b?"
    assert ask(environment, "A?B").messages[0]["content"] == "no\n"
    assert "write A?B" in ask(environment, "hello").messages[0]["content"]
    done = ask(environment, "Ab")
    assert (done.is_done, done.reward, done.metrics["questions"]) == (True, 0.5, 2.0)
    environment = Questions(questions=0)
    environment.open(row)
    assert ask(environment, "A?B").reward == 0.0
    words = environment.open({**row, "prompt": [{"role": "user", "content": "Who is who?"}]})
    assert "write A?B" in words.messages[0]["content"]


def ask(environment, text):
    return environment.reply({"role": "assistant", "content": text})


def test_the_calculator_answers_expressions():
    calculator = Calculator()
    calculator.open({"prompt": "47*86:", "answer": "4042"})
    assert ask(calculator, "47*86=").messages[0]["content"] == "4042\n"
    assert ask(calculator, "9**9**9=").messages[0]["content"] == "?\n"
    assert ask(calculator, "(" * 99 + "=").messages[0]["content"] == "?\n"
    done = ask(calculator, "4042")
    assert (done.is_done, done.reward, done.metrics["calls"]) == (True, 1.0, 3.0)
