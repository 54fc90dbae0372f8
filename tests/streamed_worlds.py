"""An outside engine that is a script: it writes known tokens, and does wrong what it is told to.

The token at a place of an answer depends on prompt and place alone. Its log-probability says which
weights wrote it, and where. So nothing can be lost, doubled or stamped wrongly without being seen.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from sortedrl.core.randomness import mix
from sortedrl.engines.streaming.backend import BackendLimits, Delta
from sortedrl.errors import EngineLost
from sortedrl.types import Prompt, Trajectory

STOP = 0
VOCABULARY, CONTEXT = 64, 40
PROMPT_TOKENS = 2
LOST = "the script ends here"


def token_at(prompt, place):
    """The token that any weights write there."""
    bits = mix(prompt, place)
    return STOP if bits % 12 == 0 else 1 + bits % (VOCABULARY - 1)


def logprob_at(version, place):
    """What weights of a version say of the token there."""
    return -(version + 1) - place / 1000


def full_answer(prompt, limit, *, stops=True):
    """The whole answer and why it ends."""
    tokens = []
    while len(tokens) < limit:
        tokens.append(token_at(prompt, len(tokens)))
        if stops and tokens[-1] == STOP:
            return tokens, "stop"
    return tokens, "length"


def prompt_tokens(prompt):
    """A prompt of its own for every number, however many there are."""
    return prompt % VOCABULARY, 1 + prompt // VOCABULARY


def fresh(prompt, *, limit=20):
    """An answer to be written; its limit stands in its fields."""
    return Trajectory(
        prompt=Prompt(id=prompt, tokens=prompt_tokens(prompt), fields={"limit": limit}),
        sample_index=0,
        group=0,
        seed=prompt,
    )


def limit_of(trajectory):
    return trajectory.prompt.fields["limit"]


@dataclass(slots=True)
class Script:
    """What the engine does, and what it does wrong."""

    slots: int = 2
    piece_tokens: int = 1
    """Tokens of one answer at a time."""
    start_seconds: float | None = None
    """How long an answer takes to reach it; an abort that comes before is forgotten."""
    last_word: bool = False
    """Whether a stream that is aborted brings one more token."""
    says_abort: bool = False
    """Whether that token is said to be broken off, although it completes the answer."""
    finishes: bool = False
    """Whether an answer that is aborted is written to its end instead."""
    ignores_abort: bool = False
    refuses_abort: BaseException | None = None
    hangs_at_abort: bool = False
    hangs_at_close: bool = False
    missing_logprob: int | None = None
    """The place of a token that has no log-probability."""
    logprob_of_place: tuple[int, float | None] | None = None
    """A place, and what its token has for a log-probability."""
    extra_tokens: int = 0
    """Tokens beyond what was asked for, in the last delta."""
    ends_unasked: int | None = None
    """The place where a stream ends without a finish reason."""
    refuses_weights: BaseException | None = None
    drops_weights: bool = False
    """Whether it has no weights after it slept."""
    says_length: bool = False
    """Whether a stop token that is the last one allowed is called the limit."""


@dataclass(slots=True, eq=False)
class _Job:
    request: object
    prompt: int
    place: int
    left: int
    deltas: deque = field(default_factory=deque)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False

    def put(self, delta):
        self.deltas.append(delta)
        self.news.set()


class ScriptedBackend:
    """Writes a delta for every unit of fuel, `slots` answers at a time by priority."""

    name = "scripted engine"

    def __init__(self, script):
        self.script = script
        self.limits = BackendLimits(slots=script.slots, context=CONTEXT, vocabulary=VOCABULARY)
        self.version = 0
        self.is_asleep = False
        self.asked = []
        self.most_at_once = 0
        self.is_closed = False
        self._fuel = 0
        self._jobs = {}
        self._is_dead = False
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def opened(cls, script):
        return cls(script)

    def grant(self, deltas):
        """Let it write so many deltas more; may be called from any thread."""
        self._loop.call_soon_threadsafe(self._burn, deltas)

    def kill(self):
        """Die in the middle of everything; may be called from any thread."""
        self._loop.call_soon_threadsafe(self._die)

    async def stream(self, request):
        self.asked.append(request)
        if self.script.start_seconds is not None:
            await asyncio.sleep(self.script.start_seconds)
        self._refuse_dead()
        place = len(request.tokens) - PROMPT_TOKENS
        prompt = request.tokens[0] + VOCABULARY * (request.tokens[1] - 1)
        job = _Job(request, prompt=prompt, place=place, left=request.max_tokens)
        self._jobs[request.id] = job
        self._burn(0)
        try:
            while not (job.is_over and not job.deltas):
                await job.news.wait()
                job.news.clear()
                while job.deltas:
                    delta = job.deltas.popleft()
                    if isinstance(delta, Exception):
                        raise delta
                    yield delta
        finally:
            self._jobs.pop(request.id, None)

    async def abort(self, ids):
        self._refuse_dead()
        script = self.script
        if script.hangs_at_abort:
            await asyncio.Event().wait()
        if script.refuses_abort is not None:
            raise script.refuses_abort
        for job in [self._jobs[id] for id in ids if id in self._jobs]:
            if script.ignores_abort or job.is_over:
                continue
            if script.finishes:
                while not job.is_over:
                    self._write(job)
                continue
            if script.last_word:
                self._write(job, is_abort=script.says_abort)
            if not job.is_over:
                self._end(job, Delta(tokens=(), logprobs=(), end="abort"))

    async def load_weights(self, weights):
        self._refuse_dead()
        assert all(job.is_over for job in self._jobs.values()), "nothing is being written"
        if self.script.refuses_weights is not None:
            raise self.script.refuses_weights
        self.version = weights.version
        self.is_asleep = False

    async def score(self, tokens, *, start):
        return [logprob_at(self.version, place) for place in range(len(tokens) - start)]

    async def sleep(self):
        assert all(job.is_over for job in self._jobs.values()), "nothing is being written"
        self.is_asleep = self.script.drops_weights
        return self.script.drops_weights

    async def close(self):
        if self.script.hangs_at_close:
            await asyncio.Event().wait()
        assert not self.is_closed
        self.is_closed = True

    def _burn(self, more):
        self._fuel += more
        while self._fuel > 0:
            open_jobs = [job for job in self._jobs.values() if not job.is_over]
            running = sorted(open_jobs, key=lambda job: job.request.priority)[: self.script.slots]
            if not running:
                return
            for job in running:
                if self._fuel > 0:
                    self._fuel -= 1
                    self._write(job)
            started = [
                job for job in open_jobs if job.place > len(job.request.tokens) - PROMPT_TOKENS
            ]
            self.most_at_once = max(self.most_at_once, sum(not job.is_over for job in started))

    def _write(self, job, *, is_abort=False):
        """The next delta of an answer."""
        tokens, logprobs, end = [], [], None
        script = self.script
        while len(tokens) < script.piece_tokens and end is None:
            if job.place == script.ends_unasked:
                self._end(job, None)
                return
            tokens.append(token_at(job.prompt, job.place))
            if script.logprob_of_place and job.place == script.logprob_of_place[0]:
                logprobs.append(script.logprob_of_place[1])
            elif job.place != script.missing_logprob:
                logprobs.append(logprob_at(self.version, job.place))
            job.place += 1
            job.left -= 1
            if tokens[-1] in job.request.stop_tokens and not (script.says_length and not job.left):
                end = "stop"
            elif not job.left:
                end = "length"
        if end is not None:
            tokens += [1] * script.extra_tokens
            logprobs += [-1.0] * script.extra_tokens
        end = "abort" if is_abort else end
        delta = Delta(tokens=tokens, logprobs=logprobs, end=end, num_cached_tokens=1)
        if end is None:
            job.put(delta)
        else:
            self._end(job, delta)

    def _end(self, job, delta):
        job.is_over = True
        if delta is not None:
            job.deltas.append(delta)
        job.news.set()

    def _die(self):
        self._is_dead = True
        for job in self._jobs.values():
            job.is_over = True
            job.put(EngineLost(LOST))

    def _refuse_dead(self):
        if self._is_dead:
            raise EngineLost(LOST)
