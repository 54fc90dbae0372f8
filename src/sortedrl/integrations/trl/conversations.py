"""The conversations of a TRL run: TRL's environments and tools, without its lock step.

    submit --> parse the turn --> [thread: reset, tool calls] --> collect --> reply, or the end

A conversation waits for its own tools only: while they run, its slot generates another one.
The objects are TRL's own and stay in this process, because reward functions look at them; their
methods run in threads, those of one object never at the same time. Parsing of calls, the text of
replies and all limits are TRL's, so the conversations are those of its loop.

A conversation can be brought to any turn by calling its tools again, if that gives the same
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
    """What TRL says about conversations; its functions are called from the main thread only."""

    parse: Callable[[list[int], list[int], str | None], Message]
    """The message of a turn: its tokens, all tokens before it, the name of the environment."""
    suffix: Callable[[list[Message]], list[int]]
    """The tokens that messages of tools add to a conversation."""
    run_async: Callable[[Coroutine[Any, Any, Any]], Any]
    max_iterations: int
    """Turns whose calls are made."""
    max_response_tokens: int
    """Tokens after the prompt: of the policy and of tools together."""
    max_context: int
    stop_tokens: frozenset[int]


@dataclass(slots=True)
class Talk:
    """A live conversation: its environment, what that has heard, and what was said."""

    name: str | None
    environment: Any
    observation: str | None = None
    """What the environment said when it was reset."""
    turns: list[list[int]] = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    calls: int = 0
    failures: int = 0
    is_over: bool = False

    def clear(self) -> None:
        """Forget everything; the environment is reset before it hears anything."""
        self.turns, self.replies, self.messages = [], [], []
        self.calls = self.failures = 0
        self.is_over = False


@dataclass(slots=True, eq=False)
class _Job:
    trajectory: Trajectory
    talk: Talk
    turns: list[list[int]]
    said: list[Message]
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
        self._talks: dict[Key, Talk] = {}
        self._jobs: dict[Key, _Job] = {}
        self._done: deque[tuple[_Job, list[Results]]] = deque()
        self._early: list[Trajectory] = []
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tools")

    def prompt_of(self, row: Row) -> Any:  # noqa: ANN401  TRL's prompt: text or messages
        """The prompt of a row with what its environment adds to it when it is reset."""
        if self._factories is None:
            return row["prompt"]
        prompt = row.get("prompt", [_EMPTY_PROMPT])
        talk = self._opened(row)
        observation = _reset(talk.environment, row, is_named=talk.name is not None)
        self._free[talk.name].append(talk.environment)
        if observation is None:
            return prompt
        last = prompt[-1]
        return [*prompt[:-1], {**last, "content": last["content"] + observation}]

    def submit(self, trajectory: Trajectory) -> None:
        """Make the calls of the last turn; never waits."""
        job = self._job(trajectory)
        self._jobs[trajectory.key] = job
        if not job.said:  # heard before, word for word: a turn that was verified
            self._deliver(job, [])
            return
        row = self._row_of(trajectory.prompt)
        made: Future[list[Results]] = self._threads.submit(self._run, job, row)
        made.add_done_callback(lambda future: self._ended(job, future))

    def cancel(self, trajectory: Trajectory) -> None:
        """Give back the environment of a conversation that is over, or begins anew."""
        job = self._jobs.pop(trajectory.key, None)
        talk = self._talks.pop(trajectory.key, None)
        with self._changed:
            if job is not None and job not in [done for done, _ in self._done]:
                job.is_cancelled = True  # its thread still has the environment
                return
            self._done = deque(pair for pair in self._done if pair[0] is not job)
        if talk is not None and talk.environment is not None:
            self._free[talk.name].append(talk.environment)

    def collect(self, *, wait: bool) -> Sequence[Trajectory]:
        """Conversations whose calls were made: with a reply in `given`, or with a finish reason."""
        early, self._early = self._early, []
        with self._changed:
            if wait and self._jobs and not early:
                self._changed.wait_for(lambda: bool(self._done) or self._error is not None)
            if self._error is not None:
                raise EnvironmentFailed(f"an environment failed: {self._error!r}") from self._error
            done, self._done = list(self._done), deque()
        return [*early, *(self._replied(job, results) for job, results in done)]

    def talks(self, trajectories: Sequence[Trajectory]) -> list[Talk]:
        """The live conversations of complete trajectories; after a resume they are held again."""
        lost = [t for t in trajectories if t.key not in self._talks]
        for trajectory in lost:
            self.submit(replace(trajectory, finish_reason=None))
        missing, others = {t.key for t in lost}, list[Trajectory]()
        while missing:
            for found in self.collect(wait=True):
                if found.key not in missing:
                    others.append(found)
                missing.discard(found.key)
        self._early += others
        return [self._talks[t.key] for t in trajectories]

    def close(self) -> None:
        """Wait for the calls that are being made, and end the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _opened(self, row: Row) -> Talk:
        if self._factories is None:
            return Talk(None, None)
        name = row.get("environment") if None not in self._factories else None
        if name not in self._factories:
            raise ConfigError(
                f"the column environment must name one of {list(self._factories)}, got {name!r}"
            )
        free = self._free[name]
        return Talk(name, free.popleft() if free else self._factories[name]())

    def _job(self, trajectory: Trajectory) -> _Job:
        key, turns = trajectory.key, trajectory.turns
        talk = self._talks.get(key)
        is_new = talk is None
        if talk is None:
            talk = self._talks[key] = self._opened(self._row_of(trajectory.prompt))
        if is_new or talk.turns != turns[: len(talk.turns)]:
            if len(turns) > 1 and not self.is_replayable:
                raise EnvironmentFailed(
                    f"the conversation {key} can be continued only by calling its tools again, "
                    "and they are not replayable; say is_replayable=True if the same calls give "
                    "the same results, or begin a new run"
                )
            talk.clear()
            is_new = True
        before = list(trajectory.prompt.tokens)
        replies = trajectory.replies
        said = []
        for number, turn in enumerate(turns):
            if number >= len(talk.turns):
                said.append(self.rules.parse(turn, before, talk.name))
            before = [*before, *turn, *(replies[number] if number < len(replies) else ())]
        return _Job(trajectory, talk, turns, said, is_reset=is_new)

    def _replied(self, job: _Job, results: list[Results]) -> Trajectory:
        trajectory, talk = job.trajectory, job.talk
        self._jobs.pop(trajectory.key, None)
        kept = trajectory.replies
        for message, made in zip(job.said, results, strict=True):
            number = len(talk.turns)
            talk.turns.append(job.turns[number])
            talk.messages.append(message)
            reply = self._reply(trajectory, talk, made)
            if number < len(kept) and reply != kept[number]:
                raise EnvironmentFailed(
                    f"the environment of prompt {trajectory.prompt.id} says that it is "
                    f"replayable, but its reply to turn {number + 1} was another one the second "
                    "time; make it deterministic, or set is_replayable to False"
                )
        if talk.is_over:
            is_stopped = trajectory.segments[-1].tokens[-1] in self.rules.stop_tokens
            return trajectory.finished("stop" if is_stopped else "length")
        return replace(trajectory, given=tuple(talk.replies[-1]))

    def _reply(self, trajectory: Trajectory, talk: Talk, made: Results) -> list[int] | None:
        """Take the results of a turn into the conversation; `None` if it ends here."""
        talk.calls += len(made)
        talk.failures += sum(isinstance(result, _Failed) for _, result in made)
        said = [_tool_message(name, result) for name, result in made]
        if said:
            reply = self.rules.suffix(said)
            spoken = sum(map(len, (*talk.turns, *talk.replies, reply)))
            fits = (
                spoken < self.rules.max_response_tokens  # one more token is to come
                and len(trajectory.prompt.tokens) + spoken < self.rules.max_context
            )
            if fits:
                talk.messages += said
                talk.replies.append(reply)
                return reply
        talk.is_over = True
        return None

    # In a thread.

    def _run(self, job: _Job, row: Row) -> list[Results]:
        talk = job.talk
        if job.is_reset and talk.environment is not None:
            talk.observation = _reset(talk.environment, row, is_named=talk.name is not None)
        known = {tool.__name__: tool for tool in (*self._tools, *_methods(talk.environment))}
        first = len(talk.turns)
        found = []
        for number, message in enumerate(job.said, start=first):
            calls = message.get("tool_calls") or []
            is_made = bool(calls) and number < self.rules.max_iterations
            found.append(self._called(known, calls) if is_made else [])
        return found

    def _called(self, known: Mapping[str, Tool], calls: Sequence[Mapping[str, Any]]) -> Results:
        """What the calls of one turn give, those of coroutines after the others, as in TRL."""
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
            elif job.talk.environment is not None:
                self._free[job.talk.name].append(job.talk.environment)
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class _Failed:
    """A call that failed, as TRL words it for the policy."""

    error: str

    def __str__(self) -> str:
        return str({"error": self.error})


def _reset(environment: Any, row: Row, *, is_named: bool) -> str | None:  # noqa: ANN401
    """What an environment says when it begins; with several, `environment` is not its column."""
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
