"""An outside engine as ours: the laws over a scripted one, with all its ways to go wrong."""

import math
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.engines.sampling import Sampling
from sortedrl.engines.streaming import backend as streams
from sortedrl.engines.streaming import streamed_engine as streamed
from sortedrl.engines.streaming.streamed_engine import StreamedEngine
from sortedrl.errors import EngineError, EngineLost, RequestError
from sortedrl.types import Prompt, Segment, Trajectory, Weights
from streamed_worlds import (
    CONTEXT,
    LOST,
    STOP,
    VOCABULARY,
    Script,
    ScriptedBackend,
    fresh,
    full_answer,
    limit_of,
    logprob_at,
)

PLENTY = 10_000
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module", autouse=True)
def quick():
    """A script says at once what it has to say, so nobody waits for it as for a real engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed, "_ABORT_AGAIN_SECONDS", 0.005)
        patch.setattr(streamed, "_STOP_SECONDS", 0.5)
        patch.setattr(streams, "_ABORT_SECONDS", 0.5)
        patch.setattr(streams, "_CLOSE_SECONDS", 0.5)
        yield


@contextmanager
def scripted(silence_seconds=5.0, is_seeded=False, **script):
    """An engine over a script, and the script; no thread is left of it."""
    before = set(threading.enumerate())
    opened = []

    async def opening():
        opened.append(await ScriptedBackend.opened(Script(**script)))
        return opened[0]

    engine = StreamedEngine(
        opening,
        max_tokens=limit_of,
        stop_tokens=[STOP],
        is_seeded=is_seeded,
        silence_seconds=silence_seconds,
    )
    try:
        yield engine, opened[0]
    finally:
        engine.close()
        engine.close()
        assert set(threading.enumerate()) <= before
        assert opened[0].is_closed


def finish(engine, backend, count):
    """So many complete answers, by prompt."""
    done = {}
    while len(done) < count:
        backend.grant(PLENTY)
        for trajectory in engine.step().finished:
            assert trajectory.prompt.id not in done
            done[trajectory.prompt.id] = trajectory
    assert not engine.interrupt()
    return done


def step_often(engine):
    for _ in range(20):
        engine.step()


def assert_true(trajectory):
    """Every token is the next one, and stamped with the weights that wrote it."""
    tokens, _ = full_answer(trajectory.prompt.id, limit_of(trajectory))
    assert trajectory.tokens == tokens[: trajectory.num_tokens]
    versions = [s.version for s in trajectory.segments for _ in s.tokens]
    assert trajectory.logprobs == [logprob_at(v, place) for place, v in enumerate(versions)]
    assert trajectory.decoded_tokens == trajectory.num_tokens
    assert len({s.version for s in trajectory.segments}) == len(trajectory.segments)


def assert_complete(trajectory):
    assert_true(trajectory)
    assert (trajectory.tokens, trajectory.finish_reason) == full_answer(
        trajectory.prompt.id, limit_of(trajectory)
    )


# --- the laws -------------------------------------------------------------------------------------


class Caller:
    """Does what a run does with an engine, and keeps books of its own."""

    def __init__(self, engine, backend):
        self.engine = engine
        self.backend = backend
        self.waiting = []
        self.running = {}
        self.done = {}
        self.decoded = 0
        self.loaded = 0
        self.is_lost = False

    def act(self, act, number):
        try:
            getattr(self, act)(number)
        except EngineLost:
            self.is_lost = True

    def submit(self, number):
        known = len(self.waiting) + len(self.running) + len(self.done)
        new = [fresh(known + n, limit=1 + (7 * known + 5 * n) % 24) for n in range(number)]
        self.waiting = new + self.waiting
        batch, self.waiting = self.waiting, []
        try:
            self.engine.submit(batch, tolerance=None)
        except EngineLost:
            self.waiting = batch
            raise
        self.running |= {t.prompt.id: t for t in batch}

    def step(self, number):
        if self.running:
            self.backend.grant(number)
        step = self.engine.step()
        self.decoded += step.decoded_tokens
        assert step.decoded_tokens or step.finished or not self.running
        for trajectory in step.finished:
            before = self.running.pop(trajectory.prompt.id)
            assert trajectory.tokens[: before.num_tokens] == before.tokens
            assert_complete(trajectory)
            self.done[trajectory.prompt.id] = trajectory

    def interrupt(self, _):
        stopped = list(self.engine.interrupt())
        assert sorted(t.prompt.id for t in stopped) == sorted(self.running)
        for trajectory in stopped:
            before = self.running.pop(trajectory.prompt.id)
            assert trajectory.finish_reason is None
            assert trajectory.tokens[: before.num_tokens] == before.tokens
            assert_true(trajectory)
        self.waiting += stopped

    def load(self, _):
        self.engine.load_weights(Weights(self.loaded + 1))
        self.loaded += 1
        assert self.engine.version == self.backend.version == self.loaded

    def kill(self, _):
        self.backend.kill()


ACTS = ("step", "submit", "interrupt", "load", "step", "submit")
programs = st.lists(st.tuples(st.sampled_from(ACTS), st.integers(1, 7)), max_size=40)
scripts = st.fixed_dictionaries(
    {
        "slots": st.sampled_from((2, 3, 1, 8)),
        "piece_tokens": st.sampled_from((1, 2, 5)),
        "start_seconds": st.sampled_from((None, 0, 0.002)),
        "last_word": st.booleans(),
        "says_abort": st.booleans(),
        "finishes": st.booleans(),
        "says_length": st.booleans(),
    }
)


@settings(max_examples=150)
@given(script=scripts, program=programs)
def test_nothing_is_lost_doubled_or_stamped_wrongly(script, program):
    with scripted(**script) as (engine, backend):
        caller = Caller(engine, backend)
        for act, number in program:
            caller.act(act, number)
        caller.interrupt(0)
        caller.submit(1)
        while caller.running:
            caller.step(PLENTY)
        assert not caller.is_lost
        assert caller.decoded == sum(t.num_tokens for t in caller.done.values())
        assert backend.most_at_once <= script["slots"]


@settings(max_examples=150)
@given(script=scripts, program=programs, rest=programs)
def test_a_killed_engine_gives_back_every_answer_with_its_tokens(script, program, rest):
    with scripted(**script) as (engine, backend):
        caller = Caller(engine, backend)
        for act, number in (*program, ("submit", 2), ("kill", 0), *rest):
            caller.act(act, number)
        while not caller.is_lost:
            caller.act("submit", 1)
            caller.act("step", 1)
        caller.interrupt(0)
        for act in ("submit", "load"):
            with pytest.raises(EngineLost, match=LOST):
                getattr(caller, act)(1)
        caller.step(0)
        assert not engine.interrupt()
        everything = [*caller.done.values(), *caller.waiting]
        assert caller.decoded == sum(t.num_tokens for t in everything)
        assert caller.decoded == sum(t.decoded_tokens for t in everything)


@given(
    limit=st.integers(1, 24),
    breaks=st.lists(st.integers(1, 6), max_size=8),
    last_word=st.booleans(),
)
@settings(max_examples=40)
def test_an_answer_has_its_limit_however_often_it_is_broken_off(limit, breaks, last_word):
    with scripted(last_word=last_word) as (engine, backend):
        work = [fresh(n, limit=limit) for n in range(3)]
        done = {}
        for tokens in breaks:
            engine.submit(work, tolerance=None)
            if work:
                backend.grant(tokens)
            done |= {t.prompt.id: t for t in engine.step().finished}
            work = list(engine.interrupt())
        engine.submit(work, tolerance=None)
        done |= finish(engine, backend, len(work))
        assert sorted(done) == [0, 1, 2]
        for trajectory in done.values():
            assert_complete(trajectory)


# --- work -----------------------------------------------------------------------------------------


def test_an_answer_that_comes_complete_is_complete_at_once():
    with scripted() as (engine, backend):
        engine.submit([fresh(n, limit=20) for n in range(20)], tolerance=None)
        done = finish(engine, backend, 20)
        assert {t.finish_reason for t in done.values()} == {"stop", "length"}
        asked = len(backend.asked)
        engine.submit(list(done.values()), tolerance=None)
        step = engine.step()
        assert {t.prompt.id: t for t in step.finished} == done
        assert step.decoded_tokens == step.prefilled_tokens == 0
        assert len(backend.asked) == asked


def test_an_answer_that_was_completed_while_it_was_stopped_is_complete_the_next_time():
    with scripted(finishes=True) as (engine, backend):
        engine.submit([fresh(1), fresh(2)], tolerance=None)
        backend.grant(1)
        engine.step()
        stopped = engine.interrupt()
        assert [t.finish_reason for t in stopped] == [None, None]
        engine.submit(stopped, tolerance=None)
        for trajectory in engine.step().finished:
            assert_complete(trajectory)


def test_an_answer_that_is_complete_when_weights_come_is_not_asked_for_again():
    with scripted(last_word=True, says_abort=True) as (engine, backend):
        engine.submit([fresh(5, limit=4)], tolerance=None)
        backend.grant(3)
        tokens = 0
        while tokens < 3:
            tokens += engine.step().decoded_tokens
        engine.load_weights(Weights(1))
        (trajectory,) = finish(engine, backend, 1).values()
        assert_complete(trajectory)
        assert [s.version for s in trajectory.segments] == [0]
        assert len(backend.asked) == 1


def test_other_sampling_and_another_limit_hold_for_their_work_only():
    with scripted() as (engine, backend):
        own = Sampling(temperature=0, stop_tokens=frozenset(), max_tokens=9)
        engine.submit([fresh(n) for n in range(4)], tolerance=None, sampling=own)
        for trajectory in finish(engine, backend, 4).values():
            assert (trajectory.tokens, trajectory.finish_reason) == full_answer(
                trajectory.prompt.id, 9, stops=False
            )
        engine.submit([fresh(n) for n in range(4)], tolerance=None)
        for trajectory in finish(engine, backend, 4).values():
            assert_complete(trajectory)
        assert [request.sampling for request in backend.asked] == [own] * 4 + [Sampling()] * 4
        assert [request.priority for request in backend.asked] == list(range(8))


def test_new_weights_keep_the_terms_of_what_runs():
    with scripted() as (engine, backend):
        own = Sampling(temperature=0, stop_tokens=frozenset(), max_tokens=9)
        engine.submit([fresh(3)], tolerance=None, sampling=own)
        backend.grant(2)
        engine.step()
        engine.load_weights(Weights(7))
        (trajectory,) = finish(engine, backend, 1).values()
        assert trajectory.tokens == full_answer(3, 9, stops=False)[0]
        assert backend.asked[-1].sampling == own


def test_prefilled_tokens_are_those_that_were_computed():
    with scripted() as (engine, backend):
        engine.submit([fresh(1), fresh(2)], tolerance=None)
        backend.grant(PLENTY)
        prefilled = finished = 0
        while finished < 2:
            step = engine.step()
            prefilled, finished = prefilled + step.prefilled_tokens, finished + len(step.finished)
        assert prefilled == 2 * (2 - 1)


def test_an_engine_with_nothing_to_do_says_so_at_once():
    with scripted() as (engine, _):
        step = engine.step()
        assert (step.finished, step.decoded_tokens, step.prefilled_tokens) == ((), 0, 0)
        assert not engine.interrupt()


# --- seeds, scores and sleep ----------------------------------------------------------------------


def test_an_answer_is_asked_for_again_with_the_same_seed_and_goes_on_with_another():
    with scripted(is_seeded=True) as (engine, backend):
        engine.submit([fresh(5)], tolerance=None)
        backend.grant(3)
        (part,) = interrupted_after(engine, tokens=3)
        redrawn = replace(part, segments=(), interruptions=1)
        engine.submit([redrawn], tolerance=None)
        assert engine.interrupt()
        engine.submit([replace(redrawn, attempt=1)], tolerance=None)
        assert engine.interrupt()
        engine.submit([part], tolerance=None)
        finish(engine, backend, 1)
        first, again, other, rest = [request.seed for request in backend.asked]
    assert first == again
    assert len({first, other, rest}) == 3
    assert all(0 <= seed < 2**63 for seed in (first, other, rest))
    assert engine.request_limits[0].no_seeds is None


def test_siblings_have_other_seeds_and_an_engine_without_seeds_says_so():
    with scripted(is_seeded=True, slots=4) as (engine, backend):
        engine.submit([replace(fresh(5), sample_index=n, seed=n) for n in range(4)], tolerance=None)
        engine.interrupt()
        assert len({request.seed for request in backend.asked}) == 4
    with scripted() as (engine, backend):
        engine.submit([fresh(5)], tolerance=None)
        engine.interrupt()
        assert [request.seed for request in backend.asked] == [None]
        assert "its own random numbers" in engine.request_limits[0].no_seeds


def test_the_tokens_of_the_policy_are_scored_and_those_of_the_environment_are_not():
    spoken = (Segment((1, 2), (-1.0,) * 2, 0), Segment((6,), (-1.0,), 0, given=(3, 4, 5)))
    talk = replace(fresh(1), segments=spoken)
    with scripted() as (engine, _):
        engine.load_weights(Weights(3))
        scores = engine.score([talk, fresh(2), stale((7,))])
    assert [score.logprobs for score in scores] == [
        [logprob_at(3, 0), logprob_at(3, 1), logprob_at(3, 5)],
        [],
        [logprob_at(3, 0)],
    ]
    assert scores[0].gaps is None


def test_tokens_are_scored_at_temperature_1_by_an_idle_engine_within_the_context():
    with scripted() as (engine, _):
        with pytest.raises(RequestError, match="at temperature 1"):
            engine.score([stale()], sampling=GREEDY)
        with pytest.raises(RequestError, match="needs one more to score it"):
            engine.score([stale((1,) * (CONTEXT - 2))])
        engine.submit([fresh(1)], tolerance=None)
        with pytest.raises(EngineError, match="must be idle to score"):
            engine.score([stale()])


def test_an_engine_that_dropped_its_weights_takes_work_when_it_has_new_ones():
    with scripted(drops_weights=True) as (engine, backend):
        engine.submit([fresh(5)], tolerance=None)
        with pytest.raises(EngineError, match="must be idle to sleep"):
            engine.sleep()
        engine.interrupt()
        assert engine.sleep()
        assert engine.sleep(), "a second time changes nothing"
        assert backend.is_asleep
        with pytest.raises(EngineError, match=r"has dropped its weights; call load_weights"):
            engine.submit([fresh(5)], tolerance=None)
        engine.submit([], tolerance=None)
        engine.load_weights(Weights(1))
        engine.submit([fresh(5)], tolerance=None)
        assert finish(engine, backend, 1)
    with scripted() as (engine, backend):
        assert not engine.sleep()
        engine.submit([fresh(5)], tolerance=None)
        assert finish(engine, backend, 1)


def interrupted_after(engine, *, tokens):
    """What comes back of answers that have so many tokens."""
    while tokens > 0:
        tokens -= engine.step().decoded_tokens
    return engine.interrupt()


# --- refusals -------------------------------------------------------------------------------------


def stale(tokens=(1,), version=0):
    segment = Segment(tuple(tokens), (-1.0,) * len(tokens), version)
    return Trajectory(prompt=fresh(1).prompt, sample_index=0, group=0, seed=0, segments=(segment,))


def prompted(tokens):
    prompt = Prompt(id=1, tokens=tuple(tokens), fields={"limit": 5})
    return Trajectory(prompt=prompt, sample_index=0, group=0, seed=0)


REFUSED = {
    "empty prompt": (prompted(()), {}, "empty prompt"),
    "token outside": (prompted((1, VOCABULARY)), {}, f"0..{VOCABULARY - 1}, got {VOCABULARY}"),
    "written token outside": (stale((-1,)), {}, "got -1"),
    "too long": (prompted([1] * CONTEXT), {}, f"prompt has {CONTEXT} tokens"),
    "no room": (fresh(1, limit=0), {}, "max_tokens must be at least 1, got 0"),
    "stale and verified": (stale(version=3), {"tolerance": 0.0}, "use mode partial"),
    "no tolerance": (fresh(1), {"tolerance": -1.0}, "0 or more nats, got -1"),
    "no number": (fresh(1), {"tolerance": math.nan}, "0 or more nats, got nan"),
}


@pytest.mark.parametrize(("bad", "terms", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_written_is_refused_and_nothing_is_taken_on(bad, terms, words):
    tolerance = terms.get("tolerance")
    with scripted() as (engine, backend):
        for batch in ([fresh(2), bad], [bad]):
            with pytest.raises(RequestError, match=words):
                engine.submit(batch, tolerance=tolerance)
        assert not backend.asked
        assert not engine.interrupt()


def test_stop_strings_are_refused():
    sampling = Sampling(stop_strings=("end",))
    with (
        scripted() as (engine, _),
        pytest.raises(RequestError, match=r"cannot stop at 'end': .*; use stop tokens"),
    ):
        engine.submit([fresh(1)], tolerance=None, sampling=sampling)


def test_tokens_of_the_present_weights_need_no_verification():
    with scripted() as (engine, backend):
        engine.load_weights(Weights(3))
        for tolerance in (0.0, math.inf):
            engine.submit([stale(full_answer(1, 1)[0], version=3)], tolerance=tolerance)
            finish(engine, backend, 1)
        engine.submit([stale(full_answer(1, 1)[0], version=2)], tolerance=math.inf)
        finish(engine, backend, 1)


def test_new_weights_are_refused_while_answers_run_that_must_be_verified():
    with scripted() as (engine, backend):
        engine.submit([fresh(1)], tolerance=0.5)
        with pytest.raises(RequestError, match="cached tokens cannot be verified"):
            engine.load_weights(Weights(1))
        assert engine.version == 0
        finish(engine, backend, 1)
        engine.load_weights(Weights(1))


# --- faults ---------------------------------------------------------------------------------------


def test_a_token_without_its_log_probability_ends_the_step_and_leaves_no_gap():
    with scripted(missing_logprob=3) as (engine, backend):
        engine.submit([fresh(5)], tolerance=None)
        backend.grant(10)
        with pytest.raises(EngineError, match="0 log-probabilities for 1 tokens"):
            step_often(engine)
        with pytest.raises(EngineError, match="0 log-probabilities for 1 tokens"):
            step_often(engine)
        (trajectory,) = engine.interrupt()
        assert trajectory.num_tokens == 3
        assert_true(trajectory)
        backend.script.missing_logprob = None
        engine.submit([trajectory], tolerance=None)
        assert_complete(finish(engine, backend, 1)[5])


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, None, -9999.0, 2.0])
def test_a_log_probability_that_is_none_never_becomes_part_of_an_answer(value):
    with scripted(logprob_of_place=(3, value), piece_tokens=2) as (engine, backend):
        engine.submit([fresh(5)], tolerance=None)
        backend.grant(10)
        words = rf"scripted engine: the answer to prompt 5, sample 0, .* {value} .* its token 3 "
        for _ in range(2):
            with pytest.raises(EngineError, match=words):
                step_often(engine)
        (trajectory,) = engine.interrupt()
        assert trajectory.num_tokens == 2
        assert_true(trajectory)
        backend.script.logprob_of_place = None
        engine.submit([trajectory], tolerance=None)
        assert_complete(finish(engine, backend, 1)[5])


def test_the_place_of_a_log_probability_counts_the_tokens_of_earlier_weights():
    with scripted() as (engine, backend):
        engine.submit([fresh(5)], tolerance=None)
        backend.grant(2)
        while engine.step().decoded_tokens == 0:
            pass
        engine.load_weights(Weights(1))
        backend.script.logprob_of_place = (4, math.nan)
        backend.grant(10)
        with pytest.raises(EngineError, match="its token 4 "):
            step_often(engine)


def test_more_tokens_than_were_asked_for_are_refused():
    with scripted(extra_tokens=1) as (engine, backend):
        engine.submit([fresh(5, limit=2)], tolerance=None)
        backend.grant(2)
        with pytest.raises(EngineError, match="may have 2 more tokens, got 3"):
            step_often(engine)
        (trajectory,) = engine.interrupt()
        assert_true(trajectory)


def test_a_stream_that_ends_without_being_asked_to_is_a_lost_engine():
    with scripted(ends_unasked=3) as (engine, backend):
        engine.submit([fresh(5)], tolerance=None)
        backend.grant(10)
        with pytest.raises(EngineLost, match="ended a stream before the answer was complete"):
            step_often(engine)
        (trajectory,) = engine.interrupt()
        assert trajectory.num_tokens == 3
        assert_true(trajectory)


def test_an_engine_that_writes_nothing_is_lost():
    with scripted(silence_seconds=0.05) as (engine, _):
        engine.submit([fresh(5)], tolerance=None)
        for _ in range(2):
            with pytest.raises(EngineLost, match="sent nothing for 0 seconds"):
                engine.step()
        assert len(engine.interrupt()) == 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"ignores_abort": True}, "does not stop within"),
        ({"hangs_at_abort": True}, "does not respond to an abort"),
        ({"refuses_abort": EngineError("not now")}, "cannot be aborted: not now"),
        ({"refuses_abort": EngineLost("gone")}, "gone"),
    ],
    ids=["ignores it", "hangs", "refuses", "is gone"],
)
def test_an_engine_that_cannot_be_stopped_is_lost_but_no_answer_is(fault, words):
    with scripted(**fault) as (engine, backend):
        engine.submit([fresh(1), fresh(2)], tolerance=None)
        backend.grant(1)
        engine.step()
        stopped = engine.interrupt()
        assert sorted(t.prompt.id for t in stopped) == [1, 2]
        assert sum(t.num_tokens for t in stopped) == 1
        for again in (lambda: engine.submit(stopped, tolerance=None), lambda: load(engine, 1)):
            with pytest.raises(EngineLost, match=words):
                again()
        assert not engine.interrupt()


def load(engine, version):
    engine.load_weights(Weights(version))


def test_an_answer_that_is_stopped_before_it_reached_the_engine_comes_back():
    with scripted(start_seconds=0.02) as (engine, backend):
        engine.submit([fresh(1), fresh(2)], tolerance=None)
        stopped = engine.interrupt()
        assert [t.num_tokens for t in stopped] == [0, 0]
        engine.submit(stopped, tolerance=None)
        finish(engine, backend, 2)


def test_an_abort_that_finds_the_script_faulty_still_stops_the_other_answers():
    with scripted(missing_logprob=1) as (engine, backend):
        engine.submit([fresh(n) for n in range(1, 4)], tolerance=None)
        backend.grant(4)
        with pytest.raises(EngineError, match="log-probabilities"):
            step_often(engine)
        engine.interrupt()
        # The script says at once if anything is still being written.
        engine.load_weights(Weights(1))


@pytest.mark.parametrize("error", [EngineError("no room"), ValueError("a bug")], ids=str)
def test_weights_that_are_refused_leave_every_answer_where_it_was(error):
    with scripted(refuses_weights=error) as (engine, backend):
        engine.submit([fresh(1), fresh(2)], tolerance=None)
        backend.grant(1)
        engine.step()
        with pytest.raises(type(error), match=str(error)):
            load(engine, 1)
        assert engine.version == 0
        with pytest.raises(type(error), match=str(error)):
            engine.step()
        stopped = engine.interrupt()
        assert sorted(t.prompt.id for t in stopped) == [1, 2]
        backend.script.refuses_weights = None
        load(engine, 1)
        engine.submit(stopped, tolerance=None)
        finish(engine, backend, 2)


def test_a_backend_that_does_not_open_leaves_no_thread():
    before = set(threading.enumerate())

    async def opening():
        raise EngineError("no such model")

    with pytest.raises(EngineError, match="no such model"):
        StreamedEngine(opening, max_tokens=5, stop_tokens=[])
    assert set(threading.enumerate()) <= before


def test_a_closed_engine_gives_its_answers_back_and_takes_no_more():
    with scripted() as (engine, backend):
        engine.submit([fresh(n) for n in range(4)], tolerance=None)
        backend.grant(1)
        engine.step()
        engine.close()
        with pytest.raises(EngineLost, match="was closed"):
            engine.step()
        stopped = engine.interrupt()
        assert len(stopped) == 4
        with pytest.raises(EngineLost, match="was closed"):
            engine.submit(stopped, tolerance=None)


def test_an_engine_that_is_closed_right_after_work_came_leaves_nothing():
    for _ in range(5):
        with scripted() as (engine, _):
            engine.submit([fresh(n) for n in range(8)], tolerance=None)


def test_an_engine_that_does_not_close_is_left():
    before = set(threading.enumerate())
    opened = []

    async def opening():
        opened.append(await ScriptedBackend.opened(Script(hangs_at_close=True)))
        return opened[0]

    engine = StreamedEngine(opening, max_tokens=5, stop_tokens=[])
    with pytest.raises(EngineLost, match="does not close"):
        engine.close()
    assert set(threading.enumerate()) <= before


def spoken(prompt, *, given, limit=20):
    """A conversation with one turn, and a reply that is not answered yet."""
    turn = Segment((5, STOP), (-1.0, -1.0), 0)
    return replace(fresh(prompt, limit=limit), segments=(turn,), given=given)


def test_a_conversation_goes_on_after_the_reply():
    with scripted() as (engine, backend):
        conversation = spoken(3, given=(7, STOP))
        engine.submit([conversation], tolerance=None)
        done = finish(engine, backend, 1)[3]
        assert backend.asked[0].tokens == (*conversation.prompt.tokens, 5, STOP, 7, STOP)
        assert backend.asked[0].max_tokens == 18
        assert done.segments[0] == conversation.segments[0]
        assert done.segments[1].given == (7, STOP)
        assert not done.given


def test_a_conversation_interrupted_before_its_next_token_keeps_the_reply():
    with scripted() as (engine, _):
        conversation = spoken(3, given=(7, 8))
        engine.submit([conversation], tolerance=None)
        (stopped,) = engine.interrupt()
        assert (stopped.given, stopped.segments) == ((7, 8), conversation.segments)


def test_a_reply_that_fills_the_context_ends_the_conversation():
    with scripted() as (engine, backend):
        engine.submit([spoken(3, given=(7,) * CONTEXT)], tolerance=None)
        done = finish(engine, backend, 1)[3]
        assert (done.finish_reason, done.tokens, done.given) == ("length", [5, STOP], ())
        engine.submit([spoken(4, given=(7,) * (CONTEXT - 6))], tolerance=None)
        assert finish(engine, backend, 1)[4].num_tokens <= 4
