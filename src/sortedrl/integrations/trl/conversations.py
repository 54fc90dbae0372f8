"""The conversations of a TRL run: TRL's environments and tools, without its lock step.

    submit --> parse the turn --> [thread: reset, tool calls] --> collect --> reply, or the end

A conversation waits for its own tools only: while they run, its slot generates another one.
The objects are TRL's own and stay in this process, because reward functions look at them; their
methods run in threads, those of one object never at the same time. Parsing of calls, the text of
replies and all limits are TRL's, so the conversations are those of its loop.

A conversation can be replayed to any turn by calling its tools again, if that gives the same
results: `is_replayable`. Coupled mode and a resumed run need that.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from sortedrl.errors import ConfigError, EnvironmentFailed
from sortedrl.types import Key, Prompt, Trajectory

Row = Mapping[str, Any]
Tool = Callable[..., Any]
Message = dict[str, Any]
Factories = Mapping[str | None, Callable[[], Any]]
_NO_TOOLS = ("reset", "get_reward")
_EMPTY_PROMPT: Message = {"role": "user", "content": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRules:
    """TRL's rules for conversations; its functions are called from the main thread only."""

    parse: Callable[[list[int], list[int], str | None], Message]
    """The message of a turn: its tokens, all tokens before it, the name of the environment."""
    suffix: Callable[[list[Message]], list[int]]
    """The tokens that messages of tools add to a conversation."""
    run_async: Callable[[Coroutine[Any, Any, Any]], Any]
    max_iterations: int
    """Turns whose tool calls are executed."""
    max_response_tokens: int
    """Tokens after the prompt: of the policy and of tools together."""
    max_context: int
    stop_tokens: frozenset[int]


@dataclass(slots=True)
class Conversation:
    """A live conversation: its environment, the turns that it has seen, and all messages."""

    name: str | None
    environment: Any
    observation: str | None = None
    """The text that the environment returned when it was reset."""
    turns: list[list[int]] = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    calls: int = 0
    failures: int = 0
    is_over: bool = False

    def clear(self) -> None:
        """Forget everything; the environment is reset before the next turn."""
        self.turns, self.replies, self.messages = [], [], []
        self.calls = self.failures = 0
        self.is_over = False


@dataclass(slots=True, eq=False)
class _Job:
    trajectory: Trajectory
    conversation: Conversation
    turns: list[list[int]]
    messages: list[Message]
    is_reset: bool
    """Whether the environment must be reset first."""
    is_cancelled: bool = False


Results = list[tuple[str, Any]]


class ToolConversations:
    """The `Environments` of the loop, over TRL's objects; to be closed."""

    def __init__(
        self,
        rules: ToolRules,
        *,
        factories: Factories | None,
        tools: Sequence[Tool],
        row_of: Callable[[Prompt], Row],
        threads: int,
        limit: int | None,
        is_replayable: bool,
    ) -> None:
        """`tools` belong to no environment; `row_of` gives the row of a prompt."""
        self.rules = rules
        self.is_replayable = is_replayable
        self.limit = limit
        self._factories = factories
        self._free: dict[str | None, deque[Any]] = {name: deque() for name in factories or ()}
        self._tools = list(tools)
        self._row_of = row_of
        self._live: dict[Key, Conversation] = {}
        self._jobs: dict[Key, _Job] = {}
        self._done: deque[tuple[_Job, list[Results]]] = deque()
        self._early: list[Trajectory] = []
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tools")

    def prompt_of(self, row: Row) -> Any:  # noqa: ANN401  TRL's prompt: text or messages
        """The prompt of a row with the text of its environment's reset."""
        if self._factories is None:
            return row["prompt"]
        prompt = row.get("prompt", [_EMPTY_PROMPT])
        conversation = self._opened(row)
        observation = _reset(conversation.environment, row, is_named=conversation.name is not None)
        self._free[conversation.name].append(conversation.environment)
        if observation is None:
            return prompt
        last = prompt[-1]
        return [*prompt[:-1], {**last, "content": last["content"] + observation}]

    def submit(self, trajectory: Trajectory) -> None:
        """Execute the tool calls of the last turn; never waits."""
        job = self._job(trajectory)
        self._jobs[trajectory.key] = job
        if not job.messages:  # the environment has seen these turns: one was verified
            self._deliver(job, [])
            return
        row = self._row_of(trajectory.prompt)
        made: Future[list[Results]] = self._threads.submit(self._run, job, row)
        made.add_done_callback(lambda future: self._ended(job, future))

    def cancel(self, trajectory: Trajectory) -> None:
        """Release the environment of a conversation that is over, or starts again."""
        job = self._jobs.pop(trajectory.key, None)
        conversation = self._live.pop(trajectory.key, None)
        with self._changed:
            if job is not None and job not in [done for done, _ in self._done]:
                job.is_cancelled = True  # its thread still has the environment
                return
            self._done = deque(pair for pair in self._done if pair[0] is not job)
        if conversation is not None and conversation.environment is not None:
            self._free[conversation.name].append(conversation.environment)

    def collect(self, *, wait: bool) -> Sequence[Trajectory]:
        """Conversations whose calls are done: with a reply in `given`, or with a finish reason."""
        early, self._early = self._early, []
        with self._changed:
            if wait and self._jobs and not early:
                self._changed.wait_for(lambda: bool(self._done) or self._error is not None)
            if self._error is not None:
                raise EnvironmentFailed(f"an environment failed: {self._error!r}") from self._error
            done, self._done = list(self._done), deque()
        return [*early, *(self._replied(job, results) for job, results in done)]

    def live(self, trajectories: Sequence[Trajectory]) -> list[Conversation]:
        """The live conversations of complete trajectories; after a resume they are replayed."""
        lost = [t for t in trajectories if t.key not in self._live]
        for trajectory in lost:
            self.submit(replace(trajectory, finish_reason=None))
        missing, others = {t.key for t in lost}, list[Trajectory]()
        while missing:
            for found in self.collect(wait=True):
                if found.key not in missing:
                    others.append(found)
                missing.discard(found.key)
        self._early += others
        return [self._live[t.key] for t in trajectories]

    def close(self) -> None:
        """Wait for the calls in progress, and end the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _opened(self, row: Row) -> Conversation:
        if self._factories is None:
            return Conversation(None, None)
        name = row.get("environment") if None not in self._factories else None
        if name not in self._factories:
            raise ConfigError(
                f"the column environment must name one of {list(self._factories)}, got {name!r}"
            )
        free = self._free[name]
        return Conversation(name, free.popleft() if free else self._factories[name]())

    def _job(self, trajectory: Trajectory) -> _Job:
        key, turns = trajectory.key, trajectory.turns
        conversation = self._live.get(key)
        is_new = conversation is None
        if conversation is None:
            conversation = self._live[key] = self._opened(self._row_of(trajectory.prompt))
        if is_new or conversation.turns != turns[: len(conversation.turns)]:
            if len(turns) > 1 and not self.is_replayable:
                raise EnvironmentFailed(
                    f"the conversation {key} can be continued only by calling its tools again, "
                    "and they are not replayable; set is_replayable=True if the same calls give "
                    "the same results, or start a new run"
                )
            conversation.clear()
            is_new = True
        before = list(trajectory.prompt.tokens)
        replies = trajectory.replies
        messages = []
        for number, turn in enumerate(turns):
            if number >= len(conversation.turns):
                messages.append(self.rules.parse(turn, before, conversation.name))
            before = [*before, *turn, *(replies[number] if number < len(replies) else ())]
        return _Job(trajectory, conversation, turns, messages, is_reset=is_new)

    def _replied(self, job: _Job, results: list[Results]) -> Trajectory:
        trajectory, conversation = job.trajectory, job.conversation
        self._jobs.pop(trajectory.key, None)
        kept = trajectory.replies
        for message, made in zip(job.messages, results, strict=True):
            number = len(conversation.turns)
            conversation.turns.append(job.turns[number])
            conversation.messages.append(message)
            reply = self._reply(trajectory, conversation, made)
            if number < len(kept) and reply != kept[number]:
                raise EnvironmentFailed(
                    f"the environment of prompt {trajectory.prompt.id} has is_replayable = "
                    f"True, but its reply to turn {number + 1} was another one the second "
                    "time; make it deterministic, or set is_replayable to False"
                )
        if conversation.is_over:
            is_stopped = trajectory.segments[-1].tokens[-1] in self.rules.stop_tokens
            return trajectory.finished("stop" if is_stopped else "length")
        return replace(trajectory, given=tuple(conversation.replies[-1]))

    def _reply(
        self, trajectory: Trajectory, conversation: Conversation, made: Results
    ) -> list[int] | None:
        """Add the results of a turn to the conversation; `None` if it ends here."""
        conversation.calls += len(made)
        conversation.failures += sum(isinstance(result, _Failed) for _, result in made)
        messages = [_tool_message(name, result) for name, result in made]
        if messages:
            reply = self.rules.suffix(messages)
            num_tokens = sum(map(len, (*conversation.turns, *conversation.replies, reply)))
            fits = (
                num_tokens < self.rules.max_response_tokens  # one more token is to come
                and len(trajectory.prompt.tokens) + num_tokens < self.rules.max_context
            )
            if fits:
                conversation.messages += messages
                conversation.replies.append(reply)
                return reply
        conversation.is_over = True
        return None

    # In a thread.

    def _run(self, job: _Job, row: Row) -> list[Results]:
        name, environment = job.conversation.name, job.conversation.environment
        if job.is_reset and environment is not None:
            job.conversation.observation = _reset(environment, row, is_named=name is not None)
        known = {tool.__name__: tool for tool in (*self._tools, *_methods(environment))}
        first = len(job.conversation.turns)
        found = []
        for number, message in enumerate(job.messages, start=first):
            calls = message.get("tool_calls") or []
            is_made = bool(calls) and number < self.rules.max_iterations
            found.append(self._called(known, calls) if is_made else [])
        return found

    def _called(self, known: Mapping[str, Tool], calls: Sequence[Mapping[str, Any]]) -> Results:
        """The results of the calls of one turn, those of coroutines last, as in TRL."""
        made: Results = []
        later: Results = []
        for call in calls:
            if call["type"] != "function":
                name = call.get("name", "unknown")
                made.append((name, _Failed(f"Unsupported tool call type: {call['type']}")))
                continue
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            tool = known.get(name)
            try:
                if tool is None:
                    raise ValueError(f"Tool {name} not found.")
                if inspect.iscoroutinefunction(tool):
                    later.append((name, self.rules.run_async(tool(**arguments))))
                else:
                    made.append((name, tool(**arguments)))
            except Exception as error:  # noqa: BLE001  returned to the policy as the tool result
                is_late = tool is not None and inspect.iscoroutinefunction(tool)
                (later if is_late else made).append((name, _Failed(str(error))))
        return [*made, *later]

    def _ended(self, job: _Job, future: Future[list[Results]]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._deliver(job, future.result())
            return
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _deliver(self, job: _Job, results: list[Results]) -> None:
        with self._changed:
            if not job.is_cancelled:
                self._done.append((job, results))
            elif job.conversation.environment is not None:
                self._free[job.conversation.name].append(job.conversation.environment)
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class _Failed:
    """A call that failed; its text is TRL's."""

    error: str

    def __str__(self) -> str:
        return str({"error": self.error})


def _reset(environment: Any, row: Row, *, is_named: bool) -> str | None:  # noqa: ANN401
    """Reset an environment; returns its text. With several, it does not get `environment`."""
    given = {k: v for k, v in row.items() if not (is_named and k == "environment")}
    observation = environment.reset(**given)
    if observation is not None and not isinstance(observation, str):
        raise ConfigError(
            f"reset() of {type(environment).__name__} must return text or None, got "
            f"{type(observation).__name__}; images need TRL's GRPOTrainer"
        )
    return observation


def _methods(environment: Any) -> list[Tool]:  # noqa: ANN401
    """The tools of an environment: all its public methods, as in TRL."""
    if environment is None:
        return []
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    return [
        inspect.getattr_static(environment, name).__get__(environment)
        for name in names
        if not name.startswith("_") and name not in _NO_TOOLS
    ]


def _tool_message(name: str, result: Any) -> Message:  # noqa: ANN401
    if isinstance(result, list):
        raise ConfigError(
            f"the tool {name!r} returned a list, which TRL takes for images and text; return "
            "text, or use TRL's GRPOTrainer"
        )
    return {"role": "tool", "name": name, "content": str(result)}
