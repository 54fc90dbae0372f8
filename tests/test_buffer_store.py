import json
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.core.buffer import Buffer, BufferState, Feed
from sortedrl.core.buffer_file import load_buffer, save_buffer
from sortedrl.errors import BufferFileError
from sortedrl.types import Prompt, Segment, Trajectory

token_lists = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20)
single = st.floats(width=32, max_value=0, allow_nan=False)
double = st.floats(max_value=0, allow_nan=False)
fields = st.dictionaries(
    st.text(max_size=5), st.none() | st.integers() | st.text() | st.lists(st.floats(0, 1))
)


@st.composite
def segments(draw):
    tokens = draw(token_lists)
    count = len(tokens)
    kind = draw(st.sampled_from(["single", "double", "range"]))
    if kind == "range":
        return Segment(range(3, 3 + count), [0.0] * count, draw(st.integers(0, 9)))
    numbers = draw(st.lists(single if kind == "single" else double, min_size=count, max_size=count))
    logprobs = array("f" if kind == "single" else "d", numbers)
    return Segment(array("i", tokens), logprobs, draw(st.integers(0, 9)))


@st.composite
def states(draw):
    def trajectory(number, *, is_ready=False):
        return Trajectory(
            prompt=Prompt(
                id=number,
                tokens=draw(token_lists),
                fields=draw(fields),
                end=draw(st.none() | st.text(max_size=5)),
            ),
            sample_index=0,
            group=draw(st.integers(0, 3)),
            seed=draw(st.integers(0, 2**64 - 1)),
            attempt=draw(st.integers(0, 3)),
            interruptions=draw(st.integers(0, 3)),
            segments=tuple(draw(st.lists(segments(), max_size=3))),
            decoded_tokens=draw(st.integers(0, 2**40)),
            finish_reason="stop" if is_ready else None,
            reward=draw(st.none() | st.floats(allow_nan=False)) if is_ready else None,
        )

    counts = draw(st.tuples(*[st.integers(0, 3)] * 3))
    numbers = iter(range(100))
    return BufferState(
        unit_size=1,
        next_group=4,
        next_prompt=100,
        num_trained=draw(st.integers(0, 10**9)),
        fresh=tuple(trajectory(next(numbers)) for _ in range(counts[0])),
        returned=tuple(trajectory(next(numbers)) for _ in range(counts[1])),
        ready=tuple(trajectory(next(numbers), is_ready=True) for _ in range(counts[2])),
    )


@given(state=states())
@settings(max_examples=60, deadline=None)
def test_what_is_saved_comes_back_exactly(state, tmp_path_factory):
    path = tmp_path_factory.mktemp("buffer") / "buffer"
    save_buffer(state, path)
    assert load_buffer(path) == state
    assert list(path.parent.iterdir()) == [path]


def saved(tmp_path):
    prompt = Prompt(id=0, tokens=[1, 2, 3])
    buffer = Buffer()
    buffer.load([Trajectory(prompt=prompt, sample_index=0, group=0, seed=7)])
    (trajectory,) = buffer.start(1, feed=Feed.OLDEST_FIRST)
    segment = Segment(array("i", [5, 6]), array("f", [-0.5, -1.5]), 2)
    buffer.put_back(
        Trajectory(
            prompt=trajectory.prompt,
            sample_index=0,
            group=0,
            seed=7,
            segments=(segment,),
            decoded_tokens=2,
        )
    )
    path = tmp_path / "buffer"
    save_buffer(buffer.state(), path)
    return path


def test_every_truncation_is_noticed(tmp_path):
    path = saved(tmp_path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BufferFileError, match=str(path)):
            load_buffer(path)


def test_a_flipped_bit_in_the_tokens_is_noticed(tmp_path):
    path = saved(tmp_path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(BufferFileError, match="checksum differs"):
        load_buffer(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x04K\x01.", b"{}\n"])
def test_a_foreign_file_is_refused(content, tmp_path):
    path = tmp_path / "buffer"
    path.write_bytes(content)
    with pytest.raises(BufferFileError, match="not a saved buffer"):
        load_buffer(path)


def test_a_header_of_another_shape_is_refused(tmp_path):
    path = saved(tmp_path)
    magic, header, payload = path.read_bytes().split(b"\n", 2)
    broken = json.loads(header)
    del broken["fresh"]
    path.write_bytes(b"\n".join([magic, json.dumps(broken).encode(), payload]))
    with pytest.raises(BufferFileError, match="damaged header"):
        load_buffer(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BufferFileError, match="No such file"):
        load_buffer(tmp_path / "absent")


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = saved(tmp_path)
    before = path.read_bytes()
    prompt = Prompt(id=0, fields={"not json": object()})
    waiting = Trajectory(prompt=prompt, sample_index=0, group=0, seed=0)
    state = BufferState(
        unit_size=1,
        next_group=1,
        next_prompt=1,
        num_trained=0,
        fresh=(waiting,),
        returned=(),
        ready=(),
    )
    with pytest.raises(BufferFileError, match="must be JSON values"):
        save_buffer(state, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
