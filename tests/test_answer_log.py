"""Answers as text: written, cut, read back; and which of an update are kept."""

from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.core.files import AnswerFile, LoggedAnswer, read_answers
from sortedrl.errors import DataError
from sortedrl.runs.training import logged, spread
from sortedrl.types import Prompt, Segment, TrainBatch
from worlds import done, fresh

ANSWER = LoggedAnswer(
    update=3,
    prompt=7,
    sample=1,
    group=0,
    versions=(1, 2),
    tokens=5,
    is_truncated=False,
    reward=1.0,
    parts={"right": 1.0},
    question="Who lies?",
    response="</script><b>Zoe</b>\n\u2028 lies",
)
answers = st.builds(
    replace,
    st.just(ANSWER),
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    parts=st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)),
    question=st.text(),
    response=st.text(),
)


@given(st.lists(answers, max_size=5))
def test_answers_read_back_as_they_were(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("log") / "answers.jsonl"
    with closing(AnswerFile(path)) as file:
        file(written)
        assert file.sync() == path.stat().st_size
    assert read_answers(path) == written


def test_a_log_that_is_kept_is_cut_to_the_checkpoint_and_a_torn_line_is_left_out(tmp_path):
    path = tmp_path / "answers.jsonl"
    with closing(AnswerFile(path)) as file:
        file([ANSWER])
        kept = file.sync()
        file([replace(ANSWER, update=4)])
    with closing(AnswerFile(path, keep_bytes=kept)) as file:
        file([replace(ANSWER, update=5)])
    path.write_bytes(path.read_bytes() + b'{"update":6,"pro')
    assert [answer.update for answer in read_answers(path)] == [3, 5]


@pytest.mark.parametrize("line", ["[]", "7", "{}", '{"update":1}', "not JSON"])
def test_a_line_that_is_no_answer_is_named(tmp_path, line):
    path = tmp_path / "answers.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=r"answers.jsonl:1: expected an object with update"):
        read_answers(path)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(0, 12))
def test_the_answers_kept_span_the_lengths(lengths, count):
    trajectories = [done(fresh(i), tokens=tokens) for i, tokens in enumerate(lengths)]
    kept = spread(trajectories, count)
    assert len(kept) == min(count, len(lengths))
    assert len({t.key for t in kept}) == len(kept)
    found = [t.num_tokens for t in kept]
    assert found == sorted(found)
    if count > 1 and lengths:
        assert (found[0], found[-1]) == (min(lengths), max(lengths))


def test_an_answer_is_kept_with_its_words_versions_and_reward():
    trajectory = replace(
        done(fresh(4), tokens=3),
        prompt=Prompt(id=4, tokens=[65, 66]),
        segments=(Segment([1], [0.0], 2), Segment([2, 3], [0.0, 0.0], 5)),
        finish_reason="length",
        reward=0.5,
        reward_parts={"format": 0.5},
    )
    (found,) = logged(
        TrainBatch(5, (trajectory,)),
        update=6,
        count=8,
        question=lambda tokens: bytes(tokens).decode(),
        response=lambda t: f"{t.num_tokens} tokens",
    )
    assert (found.question, found.response) == ("AB", "3 tokens")
    assert (found.update, found.prompt, found.versions) == (6, 4, (2, 5))
    assert (found.reward, found.parts, found.is_truncated) == (0.5, {"format": 0.5}, True)
