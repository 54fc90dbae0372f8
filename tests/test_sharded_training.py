"""The sharded trainer: two processes make the update that one makes, and are never out of step."""

import json
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import sharded_worlds
from native_worlds import tiny_model
from sharded_worlds import Case, Pair, outcome, outcome_alone, updated_alone
from sortedrl.config.algorithm import Algorithm, Correction, Optimisation
from sortedrl.config.schedule import Schedule
from sortedrl.config.train import Lora
from sortedrl.errors import CheckpointError, ConfigError
from sortedrl.training.batch import Answers, TokenSequence, micro_batches
from sortedrl.training.checkpoint import save, verify
from sortedrl.training.fsdp.checkpoint import Shards, read_joined
from sortedrl.training.fsdp.model import rows_of
from sortedrl.training.fsdp.ranks import balanced, open_ranks
from sortedrl.training.lora import load_adapters, merged_tensors
from sortedrl.types import Prompt, Segment, Trajectory
from training_worlds import train_settings

SIZES = st.lists(st.integers(1, 500), max_size=40)


@given(sizes=SIZES, parts=st.integers(1, 9))
def test_every_sequence_is_in_one_share_and_shares_are_alike(sizes, parts):
    shares = balanced(sizes, parts=parts)
    assert len(shares) == parts
    assert sorted(chain(*shares)) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)
    assert balanced(list(sizes), parts=parts) == shares


def test_there_is_no_split_into_no_parts():
    with pytest.raises(ConfigError, match="at least 1 part, got 0"):
        balanced([1], parts=0)


class Seat:
    """A rank of a team that never meets."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def shares(self, sizes):
        return balanced(sizes, parts=self.world)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    world=st.integers(1, 5),
    budget=st.integers(1, 100),
)
def test_ranks_have_equally_many_micro_batches_and_each_answer_once(lengths, world, budget):
    trajectories = [
        Trajectory(
            prompt=Prompt(id=number, tokens=(1, 2)),
            sample_index=0,
            group=0,
            seed=0,
            segments=(Segment([3] * length, [0.0] * length, 0),),
            reward=0.0,
        )
        for number, length in enumerate(lengths)
    ]
    answers = Answers.of(trajectories, version=0)
    sequences = [TokenSequence(t.prompt.tokens, t.tokens) for t in trajectories]
    found = [
        micro_batches(
            range(len(answers)),
            answers,
            sequences,
            micro_batch_tokens=budget,
            ranks=Seat(rank, world),
        )
        for rank in range(world)
    ]
    assert len({len(rank.parts) for rank in found}) == 1
    assert len({rank.fill for rank in found}) == 1
    indices = [batch.token_indices for rank in found for batch in rank.parts]
    assert torch.cat(indices).sort().values.equal(torch.arange(sum(lengths)))
    for batch in (batch for rank in found for batch in rank.parts):
        assert batch.read(sequences), "an empty micro-batch reads something too"


@given(size=st.integers(1, 300), world=st.integers(1, 9))
def test_rows_of_ranks_are_those_that_torch_gives_them(size, world):
    rows = [rows_of(size, rank=rank, world=world) for rank in range(world)]
    chunks = torch.arange(size).chunk(world)
    for (start, stop), chunk in zip(rows, chunks, strict=False):
        assert list(range(start, stop)) == chunk.tolist()
    assert all(start == stop for start, stop in rows[len(chunks) :])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two processes for all tests of this module."""
    pair = Pair(tmp_path_factory.mktemp("meeting"))
    yield pair
    pair.close()


def case(
    name="reinforce_pp",
    *,
    pass_tokens=20,
    steps=1,
    epochs=1,
    correction=None,
    state="fp32",
    lora=None,
    **changes,
):
    """A case whose passes are short, so that every rank makes several.

    With so large an epsilon a weight moves by its gradient. With a small one AdamW moves it by the
    gradient's sign, and turns rounding errors of gradients near 0 into whole steps.
    """
    special = {} if correction is None else {"correction": correction}
    if lora is not None:
        special["lora"] = lora
    settings = train_settings(
        algorithm=Algorithm(name=name, **changes.pop("algorithm", {})),
        optimiser=Optimisation(
            learning_rate=1e-2, epsilon=1e-3, mini_batches=steps, epochs=epochs, state=state
        ),
        schedule=Schedule(
            group_prompts=4, samples_per_prompt=2, update_batch=8, harvest_unit="prompt"
        ),
        pass_tokens=pass_tokens,
        max_tokens=80,
        **special,
    )
    return Case(settings, **changes)


def assert_same(found, expected, *, atol=1e-5):
    """The same weights, and the same numbers but for what depends on the number of processes."""
    assert found.version == expected.version
    for ours, theirs in ((found.weights, expected.weights), (found.values, expected.values)):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, atol=atol, rtol=0, msg=name)
    assert found.numbers.keys() == expected.numbers.keys()
    for name in expected.numbers.keys() - {"fill", "update_seconds"}:
        assert found.numbers[name] == pytest.approx(expected.numbers[name], rel=1e-3, abs=1e-4), (
            name
        )


CASES = {
    "reinforce_pp": case(),
    "grpo": case("grpo", algorithm={"kl_coef": 0.1, "entropy_coef": 0.01}),
    "kl_in_reward": case(algorithm={"kl_coef": 0.05, "kl_place": "reward"}),
    "ppo": case("ppo", algorithm={"gae_lambda": 0.9}),
    "steps_and_epochs": case("ppo", steps=2, epochs=2),
    "sequence_correction": case(correction=Correction(kind="sequence_mis")),
    "answer_ratios": case("gspo", steps=2),
    "scaled_steps": case(
        correction=Correction(kind="token_tis", mask="geometric", scale_by_ess="sequence"), steps=2
    ),
    "one_long_answer": case(lengths=(1, 2, 1, 70, 2, 1)),
    "fewer_answers_than_ranks": case(lengths=(9,), algorithm={"entropy_coef": 0.1}),
    "tied_embeddings": case(architecture="qwen3"),
    "sliding_windows": case(architecture="gemma3"),
    "checkpointed_layers": case(is_checkpointed=True),
    "adapters": case("grpo", lora=Lora(rank=4), algorithm={"kl_coef": 0.1}),
    "adapters_with_rows_for_one_rank": case(
        lora=Lora(rank=1), algorithm={"kl_coef": 0.05, "kl_place": "reward"}, is_checkpointed=True
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_make_the_updates_that_one_process_makes(pair, name):
    expected = updated_alone(CASES[name])
    begun = CASES[name].model().state_dict()
    moved = max(float((t - begun[n]).abs().max()) for n, t in expected.weights.items())
    for found in pair.do(sharded_worlds.updated, CASES[name]):
        assert_same(found, expected)
    assert moved > 1e-3


def test_ranks_have_the_same_weights_and_numbers_bit_for_bit(pair):
    first, second = pair.do(sharded_worlds.updated, case("ppo", steps=2))
    for name, tensor in first.weights.items():
        assert second.weights[name].equal(tensor), name
    for name in first.numbers.keys() - {"update_seconds"}:
        assert first.numbers[name] == second.numbers[name], name


@pytest.mark.parametrize("state", ["offload", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_keep_their_part_of_the_state_elsewhere(pair, tmp_path, state, dtype):
    cases = [case(dtype=dtype, state=name) for name in ("fp32", state)]
    expected, found = (pair.do(sharded_worlds.updated, what)[0] for what in cases)
    for name, tensor in expected.weights.items():
        if state == "offload":
            assert found.weights[name].equal(tensor), name
        else:
            torch.testing.assert_close(found.weights[name], tensor, atol=2e-2, rtol=0, msg=name)
    for kind in ("full", "sharded"):
        folder = tmp_path / kind
        counters, undisturbed = saved(pair, folder, kind, cases[1])
        for again in pair.do(sharded_worlds.resumed, cases[1], folder, kind, counters):
            for name, tensor in undisturbed.weights.items():
                assert again.weights[name].equal(tensor), name


def test_half_precision_has_masters_in_parts(pair):
    half = case(dtype=torch.bfloat16)
    expected = updated_alone(half, 1)
    for found in pair.do(sharded_worlds.updated, half, 1):
        assert found.version == 1
        assert found.numbers["grad_norm"] == pytest.approx(expected.numbers["grad_norm"], rel=1e-4)
        for name, tensor in expected.weights.items():
            assert found.weights[name].dtype == torch.bfloat16
            # Gradients of 16 bits are summed in other parts, in an order of the processor's own:
            # a step of 1e-2 may differ by its third digit, and be rounded the other way.
            torch.testing.assert_close(found.weights[name], tensor, atol=5e-4, rtol=8e-3, msg=name)


def test_one_rank_is_the_trainer_of_one_process(tmp_path):
    ranks = open_ranks(f"file://{tmp_path}/meeting", rank=0, world=1)
    try:
        for name in ("grpo", "ppo"):
            found = sharded_worlds.updated(ranks, CASES[name])
            expected = updated_alone(CASES[name])
            assert_same(found, expected, atol=1e-6)
            assert found.numbers["fill"] == expected.numbers["fill"]
    finally:
        ranks.close()


def test_in_float16_ranks_scale_the_loss_alike(pair):
    half = case(dtype=torch.float16)
    expected = updated_alone(half, 2)
    for found in pair.do(sharded_worlds.updated, half, 2):
        assert found.version == 2
        assert found.numbers["loss_scale"] == expected.numbers["loss_scale"]
        assert found.numbers["grad_norm"] == pytest.approx(expected.numbers["grad_norm"], rel=1e-2)


def test_weights_that_are_not_finite_on_one_rank_are_saved_by_none(pair, tmp_path):
    for said, files in pair.do(sharded_worlds.broken_is_refused, case(), tmp_path):
        assert len(said) == 2
        assert all("model.embed_tokens.weight hold NaN or infinite values" in one for one in said)
        assert files == []


def test_a_loss_that_is_no_number_on_one_rank_skips_the_step_on_all(pair):
    poison = case(correction=Correction(ratio="behaviour"))
    for before, after, later in pair.do(sharded_worlds.poisoned, poison):
        assert (before.version, after.version, later.version) == (0, 0, 1)
        assert after.numbers["skipped_steps"] == 1
        for name, tensor in before.weights.items():
            assert after.weights[name].equal(tensor), name
        assert any(not later.weights[n].equal(t) for n, t in before.weights.items())


def test_a_gradient_that_is_infinite_on_one_rank_skips_the_step_on_all(pair):
    for step, num_steps in pair.do(sharded_worlds.blown_up, case()):
        assert not step.is_applied
        assert step.grad_norm == float("inf")
        assert num_steps == 0


def test_ranks_refuse_to_train_on_different_batches(pair):
    for rank, said in enumerate(pair.do(sharded_worlds.given_different_batches, case())):
        assert (
            f"must be given the same batch, got different ones; rank {rank} has 8 answers" in said
        )


def test_between_calls_a_rank_holds_its_part_and_nothing_else(pair):
    what = case("ppo", algorithm={"kl_coef": 0.1})
    for models in pair.do(sharded_worlds.held, what):
        assert len(models) == 3
        assert all(own == whole / 2 for own, whole in models)


def test_buckets_hold_every_weight_within_their_size(pair):
    model = tiny_model("qwen3", std=0.3).state_dict()
    for sizes in pair.do(sharded_worlds.bucket_sizes, CASES["tied_embeddings"], 20_000):
        names = [name for bucket in sizes for name in bucket]
        assert sorted(names) == sorted(model)
        for bucket in sizes:
            own = {name: size for name, size in bucket.items() if name != "lm_head.weight"}
            assert sum(own.values()) <= 20_000 or len(own) == 1
        (tied,) = [bucket for bucket in sizes if "lm_head.weight" in bucket]
        assert "model.embed_tokens.weight" in tied, "names of one tensor travel together"


def saved(pair, folder, kind, what):
    """A checkpoint after one update; its counters, and what the next update came to."""
    found = []
    save(folder, lambda made: found.extend(pair.do(sharded_worlds.saved, what, made, kind)))
    verify(folder)
    counters, expected = found[0]
    assert found[1][0] == counters
    return json.loads(json.dumps(counters)), expected


KINDS = ("full", "sharded")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lora", [None, Lora(rank=3)])
def test_ranks_go_on_from_their_checkpoint_as_if_nothing_had_happened(pair, tmp_path, kind, lora):
    what = case("ppo", lora=lora)
    counters, expected = saved(pair, tmp_path / "one", kind, what)
    for found in pair.do(sharded_worlds.resumed, what, tmp_path / "one", kind, counters):
        assert_same(found, expected, atol=0)


SOURCES = {
    "llama": case("ppo", algorithm={"kl_coef": 0.1}),
    "qwen3": case(architecture="qwen3", dtype=torch.bfloat16),
    "gemma3": case(architecture="gemma3"),
    "adapters": case(lora=Lora(rank=3), algorithm={"kl_coef": 0.1}),
}


@pytest.mark.parametrize("name", SOURCES)
def test_ranks_that_read_their_rows_train_what_they_would_have_loaded(pair, tmp_path, name):
    what = SOURCES[name]
    model = tiny_model(what.architecture, std=0.3).to(what.dtype)
    model.save_pretrained(tmp_path / "one", max_shard_size="50KB")
    for begun, updated, *expected in pair.do(sharded_worlds.read, what, tmp_path / "one"):
        assert_same(begun, expected[0], atol=0)
        assert_same(updated, expected[1], atol=0)


@pytest.mark.parametrize("is_gguf", [False, True])
def test_what_no_safetensors_file_has_is_broadcast_by_the_first_rank(pair, gguf_file, is_gguf):
    name = gguf_file if is_gguf else "tiny:hidden=32,layers=2,heads=2,seed=3"
    for begun, updated, *expected in pair.do(sharded_worlds.read, case(), name):
        assert_same(begun, expected[0], atol=0)
        assert_same(updated, expected[1], atol=0)


def test_a_model_that_one_rank_cannot_read_is_refused_by_all(pair, tmp_path):
    tiny_model().save_pretrained(tmp_path / "one")
    file = tmp_path / "one" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for said in pair.do(sharded_worlds.unreadable, case(), tmp_path / "one"):
        assert "cannot load" in said


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_ranks_are_resumed_and_exported_by_one_process(pair, tmp_path, kind):
    what = case("grpo", lora=Lora(rank=3), algorithm={"kl_coef": 0.1})
    folder = tmp_path / "one"
    counters, expected = saved(pair, folder, kind, what)
    trainer, model = what.alone()
    if kind == "full":
        load_adapters(model, folder)
        trainer.load(folder, counters)
        merged = type(model).from_pretrained(folder / "model").state_dict()
        for name, tensor in merged_tensors(model).items():
            assert merged[name].equal(tensor), name
    else:
        read_joined(trainer, folder, counters=counters)
        assert Shards(folder).shapes("adapters").keys() == expected.weights.keys()
    trainer.update(what.batch(1))
    assert_same(outcome_alone(trainer, model), expected)


def test_a_model_is_written_in_files_of_limited_size(pair, tmp_path):
    what = case(architecture="qwen3")
    pair.do(sharded_worlds.exported, what, tmp_path, 50_000)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    trainer, model = what.alone()
    trainer.update(what.batch(0))
    for name, tensor in type(model).from_pretrained(tmp_path).state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], atol=1e-5, rtol=0)


def test_one_process_reads_a_full_checkpoint_of_ranks(pair, tmp_path):
    what = case("ppo", architecture="qwen3")
    folder = tmp_path / "one"
    counters, expected = saved(pair, folder, "full", what)
    model = type(what.model()).from_pretrained(folder / "model")
    trainer, _ = sharded_worlds.replace_model(what, model).alone()
    trainer.load(folder, counters)
    trainer.update(what.batch(1))
    assert_same(outcome_alone(trainer, model), expected)


def test_ranks_read_a_checkpoint_of_one_process(pair, tmp_path):
    what = case("ppo", architecture="qwen3")
    trainer, model = what.alone()
    trainer.update(what.batch(0))
    counters = {}

    def write(folder):
        counters.update(trainer.save(folder, tokenizer=sharded_worlds.Silent()))

    save(tmp_path / "one", write)
    trainer.update(what.batch(1))
    expected = outcome_alone(trainer, model)
    for found in pair.do(sharded_worlds.resumed, what, tmp_path / "one", "full", counters):
        assert_same(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_numbers_of_processes_read_a_sharded_checkpoint(pair, tmp_path, dtype):
    what = case(architecture="qwen3", dtype=dtype)
    folder = tmp_path / "one"
    counters, _ = saved(pair, folder, "sharded", what)
    expected = pair.do(sharded_worlds.resumed, what, folder, "sharded", counters)[0]
    trainer, model = what.alone()
    read_joined(trainer, folder, counters=counters)
    masters = trainer.optimiser.state()[0]
    ranks = open_ranks(f"file://{tmp_path}/meeting", rank=0, world=1)
    try:
        spread = what.sharded(ranks)
        sharded_worlds.read_sharded(spread, folder, counters=counters)
        for name, tensor in spread.trainer.optimiser.state()[0].items():
            assert tensor.full_tensor().equal(masters[name]), name
        for name, tensor in outcome(spread).weights.items():
            assert tensor.equal(model.state_dict()[name]), name
    finally:
        ranks.close()
    if dtype == torch.float32:
        trainer.update(what.batch(1))
        assert_same(outcome_alone(trainer, model), expected)


def test_a_sharded_checkpoint_has_safetensors_of_every_rank_and_no_pickle(pair, tmp_path):
    folder = tmp_path / "one"
    saved(pair, folder, "sharded", case(architecture="qwen3"))
    shapes = Shards(folder).shapes("model")
    assert shapes["model.norm.weight"] == (48,)
    assert "lm_head.weight" not in shapes, "a tensor with two names is saved once"
    files = sorted((folder / "shards").iterdir())
    assert [path.name[:11] for path in files] == ["shard-00001", "shard-00002"]
    for path in files:
        with safe_open(path, framework="pt") as file:
            assert file.get_slice("model/model.norm.weight").get_shape() == [24]


def test_what_is_missing_in_a_sharded_checkpoint_is_named(pair, tmp_path):
    folder = tmp_path / "one"
    counters, _ = saved(pair, folder, "sharded", case())
    with pytest.raises(CheckpointError, match="has no critic; it was saved by a run with other"):
        Shards(folder).shapes("critic")
    with pytest.raises(CheckpointError, match=r"shards: cannot be read"):
        Shards(tmp_path)
    other = case(architecture="qwen3")
    trainer, _model = other.alone()
    with pytest.raises(CheckpointError, match="must be that of the run, but they differ in"):
        read_joined(trainer, folder, counters=counters)
    trainer, _model = case().alone()
    first, last = sorted((folder / "shards").iterdir())
    last.rename(tmp_path / "last")
    with pytest.raises(CheckpointError, match="must be that of the run, but they differ in"):
        read_joined(trainer, folder, counters=counters)
    (tmp_path / "last").rename(last)
    first.unlink()
    with pytest.raises(CheckpointError, match=r"shards: rows of 'model/.*' are missing"):
        Shards(folder)


def test_ranks_that_cannot_write_all_say_so_and_go_on(pair, tmp_path):
    (tmp_path / "file").touch()
    first, second = pair.do(sharded_worlds.unwritable, case(), tmp_path / "file")
    assert [version for _, version in (first, second)] == [1, 1]
    assert all("Not a directory" in said for said in first[0])
    assert "1 of 2 ranks could not write their part; rank 0: NotADirectoryError" in second[0][0]
    assert "Not a directory" in second[0][1]
