"""Where AdamW keeps its state: in main memory it gives the same bits, in 8 bits it learns alike."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from sortedrl.config.algorithm import Optimisation
from sortedrl.errors import ConfigError
from sortedrl.training import adam_state
from sortedrl.training.adam_state import FIRST, SECOND, EightBitState, _codebook, _Packed
from sortedrl.training.optimiser import Optimiser

torch.set_num_threads(1)

STATES = ("fp32", "8bit", "offload")
KNOBS = Optimisation(
    learning_rate=0.01, warmup_steps=2, weight_decay=0.1, max_grad_norm=0.05, beta2=0.95
)
INPUTS = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(32, 8, generator=torch.Generator().manual_seed(2))


def network(dtype=torch.float32, *, width=64):
    """Matrices of many blocks, and biases of less than one."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Linear(16, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, 8)
        )
    return layers.to(dtype)


def optimiser_of(model, **changes):
    return Optimiser(dict(model.named_parameters()), replace(KNOBS, **changes), total_steps=None)


def train(model, optimiser, steps, *, parts=2):
    """The losses of some steps, each of several micro-batches."""
    losses = []
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        total = 0.0
        for rows in torch.arange(32).chunk(parts):
            errors = model(INPUTS[rows].to(dtype)) - TARGETS[rows].to(dtype)
            loss = errors.float().square().sum() / TARGETS.numel()
            optimiser.backward(loss)
            total += loss.item()
        assert optimiser.step().is_applied
        losses.append(total)
    return losses


def everything(model, optimiser):
    tensors, values = optimiser.state()
    own = {name: p.detach() for name, p in model.named_parameters()} | tensors
    return {name: t.clone().reshape(-1).view(torch.uint8) for name, t in own.items()}, values


def assert_same_bits(first, second):
    assert first[1] == second[1]
    assert first[0].keys() == second[0].keys()
    for name, tensor in first[0].items():
        assert tensor.equal(second[0][name]), name


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch):
    """Every matrix has several pieces, and the last one is shorter."""
    monkeypatch.setattr(adam_state, "PIECE_NUMBERS", 768)


@pytest.mark.parametrize("gradients", ["fp32", "weights"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_in_main_memory_gives_the_bits_of_state_on_the_device(dtype, gradients):
    if (dtype, gradients) == (torch.float16, "weights"):
        pytest.skip("refused")
    outcomes = []
    for state in ("fp32", "offload"):
        model = network(dtype)
        optimiser = optimiser_of(model, state=state, gradients=gradients)
        losses = train(model, optimiser, 6)
        outcomes.append((losses, everything(model, optimiser)))
    assert outcomes[0][0] == outcomes[1][0]
    assert_same_bits(outcomes[0][1], outcomes[1][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", STATES)
def test_a_resumed_optimiser_has_the_same_future_bit_for_bit(dtype, state):
    model, other = network(dtype), network(dtype)
    optimiser = optimiser_of(model, state=state)
    train(model, optimiser, 3)
    tensors, values = optimiser.state()
    saved, weights = save(tensors), save(model.state_dict())
    expected = train(model, optimiser, 4)

    other.load_state_dict(load(weights))
    resumed = optimiser_of(other, state=state)
    resumed.load_state(load(saved), values)
    assert train(other, resumed, 4) == expected
    assert_same_bits(everything(model, optimiser), everything(other, resumed))


@pytest.mark.parametrize("writer", STATES)
@pytest.mark.parametrize("reader", STATES)
def test_each_state_reads_what_another_wrote(writer, reader):
    model, other = network(torch.bfloat16), network(torch.bfloat16)
    optimiser = optimiser_of(model, state=writer)
    train(model, optimiser, 3)
    tensors, values = optimiser.state()
    resumed = optimiser_of(other, state=reader)
    resumed.load_state(load(save(tensors)), values)
    found, counts = resumed.state()
    assert counts == values
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {
        n: (t.dtype, t.shape) for n, t in tensors.items()
    }
    is_exact = reader != "8bit" or writer == "8bit"
    for name, tensor in tensors.items():
        if is_exact or name.startswith("master."):
            assert found[name].equal(tensor), name
        else:
            torch.testing.assert_close(found[name], tensor, rtol=0.1, atol=0.01 * tensor.max())
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert ours.equal(theirs)


@pytest.mark.parametrize("state", STATES)
def test_a_gradient_that_is_not_finite_changes_no_bit(state):
    model = network(torch.bfloat16)
    optimiser = optimiser_of(model, state=state)
    train(model, optimiser, 2)
    before = everything(model, optimiser)
    (model[0].weight.float().sum() * torch.inf).backward()
    assert not optimiser.step().is_applied
    assert_same_bits(before, everything(model, optimiser))


@pytest.mark.parametrize("gradients", ["fp32", "weights"])
def test_in_8_bits_the_loss_falls_as_in_32(gradients):
    losses = {}
    for state in ("fp32", "8bit"):
        model = network(torch.bfloat16, width=256)
        optimiser = optimiser_of(model, state=state, gradients=gradients, max_grad_norm=None)
        losses[state] = train(model, optimiser, 60)
    start, end = losses["fp32"][0], losses["fp32"][-1]
    assert end < 0.3 * start, "there is something to learn"
    fallen = (start - losses["8bit"][-1]) / (start - end)
    assert fallen == pytest.approx(1.0, abs=0.05)


def test_in_8_bits_moments_take_a_quarter_of_the_memory():
    model = network(torch.bfloat16, width=256)
    parameters = dict(model.named_parameters())
    state = EightBitState(parameters, KNOBS)
    numbers = sum(p.numel() for p in model.parameters())
    bytes_held = sum(tensor.nbytes for tensor in state.on_device())
    assert bytes_held < (4 + 2.2) * numbers
    assert optimiser_of(model, state="offload")._state.on_device() == []


NUMBERS = st.lists(
    st.floats(-1e6, 1e6, width=32, allow_subnormal=False), min_size=256, max_size=256
)


@settings(max_examples=30)
@given(numbers=NUMBERS, moment=st.sampled_from([FIRST, SECOND]))
def test_packing_is_near_and_packing_again_changes_nothing(numbers, moment):
    given_256 = torch.tensor(numbers)
    given_256 = given_256 if moment == FIRST else given_256.abs()
    packed = _Packed(given_256, moment)
    packed.set(given_256)
    found = packed.numbers()
    shares = _codebook(moment == FIRST, given_256.device) * given_256.abs().max()
    nearest = (given_256[:, None] - shares).abs().min(dim=1).values
    # A second moment of 0 becomes the smallest share.
    allowed = nearest.maximum(shares.abs().topk(2, largest=False).values[1])
    assert bool(((found - given_256).abs() <= 1.001 * allowed).all())
    codes = [held.clone() for held in packed.held]
    packed.set(found)
    assert all(now.equal(before) for now, before in zip(packed.held, codes, strict=True))
    assert packed.numbers().equal(found)


def test_a_second_moment_never_becomes_0():
    numbers = torch.full((256,), 1e-12)
    numbers[0] = 1.0
    packed = _Packed(numbers, SECOND)
    packed.set(numbers)
    assert bool((packed.numbers() > 0).all())
    packed.set(torch.zeros(256))
    assert packed.numbers().equal(torch.zeros(256))


def test_gradients_in_the_precision_of_the_weights_need_no_sums_in_32_bits():
    model = network(torch.bfloat16)
    optimiser = optimiser_of(model, gradients="weights")
    model(INPUTS.bfloat16()).float().square().mean().backward()
    assert {g.dtype for g in optimiser.gradients().values()} == {torch.bfloat16}
    assert optimiser.step().is_applied
    other = network(torch.bfloat16)
    precise = optimiser_of(other)
    train(model, optimiser, 5)
    model(INPUTS.bfloat16()).float().square().mean().backward()
    other(INPUTS.bfloat16()).float().square().mean().backward()
    assert {g.dtype for g in precise.gradients().values()} == {torch.float32}


def test_the_norm_of_16_bit_gradients_is_computed_in_32():
    weights = {str(n): nn.Parameter(torch.ones(1000, dtype=torch.bfloat16)) for n in range(3)}
    optimiser = Optimiser(weights, Optimisation(gradients="weights"), total_steps=None)
    sum(p.float().sum() for p in weights.values()).backward()
    assert optimiser.step().grad_norm == pytest.approx(3000**0.5, rel=1e-6)


def test_what_cannot_be_kept_so_is_refused():
    with pytest.raises(ConfigError, match=r"'weights' needs .* float16"):
        optimiser_of(network(torch.float16), gradients="weights")
    for state in ("8bit", "offload"):
        with pytest.raises(ConfigError, match=r"float64; set optimiser.state to 'fp32'"):
            optimiser_of(network(torch.float64), state=state)
    with pytest.raises(ConfigError, match=r"optimiser\.state"):
        Optimisation(state="4bit")


@pytest.mark.parametrize("state", ["8bit", "offload"])
def test_the_state_of_a_rank_is_saved_from_main_memory_and_not_from_its_gpu(state):
    # A mesh of GPUs can be described without any; whatever moves a tensor to one fails.
    mesh = DeviceMesh("cuda", torch.arange(1), _init_backend=False, _rank=0)
    whole = torch.randn(64, 16, generator=torch.Generator().manual_seed(3))
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
    weight = nn.Parameter(DTensor(whole.clone(), spec, requires_grad=False))
    optimiser = Optimiser({"weight": weight}, replace(KNOBS, state=state), total_steps=None)
    tensors, _ = optimiser.state()
    assert tensors.keys() == {f"{moment}.weight" for moment in (FIRST, SECOND)}
    for tensor in tensors.values():
        assert isinstance(tensor, DTensor)
        assert (tensor.shape, tensor.dtype) == (whole.shape, torch.float32)
        assert tensor.to_local().device.type == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_state_in_main_memory_gives_the_same_bits(dtype):
    outcomes = []
    for state in ("fp32", "offload"):
        model = network(dtype, width=512).cuda()
        optimiser = optimiser_of(model, state=state)
        for _ in range(6):
            errors = model(INPUTS.cuda().to(dtype)).float() - TARGETS.cuda()
            errors.square().mean().backward()
            optimiser.step()
        tensors, _ = optimiser.state()
        own = {name: p.detach() for name, p in model.named_parameters()} | tensors
        outcomes.append({name: t.cpu() for name, t in own.items()})
    assert outcomes[0].keys() == outcomes[1].keys()
    for name, tensor in outcomes[0].items():
        assert tensor.equal(outcomes[1][name]), name


def test_in_8_bits_it_steps_like_torchao():
    torchao_optim = pytest.importorskip("torchao.optim")
    torch.compiler.set_stance("force_eager")  # torchao compiles each step
    ours, theirs = network(width=256), network(width=256)
    optimiser = Optimiser(
        dict(ours.named_parameters()),
        Optimisation(learning_rate=0.01, max_grad_norm=None, state="8bit"),
        total_steps=None,
    )
    adam = torchao_optim.AdamW8bit(theirs.parameters(), lr=0.01, weight_decay=0.0)
    start = (ours(INPUTS) - TARGETS).square().mean().item()
    for _ in range(20):
        (ours(INPUTS) - TARGETS).square().mean().backward()
        optimiser.step()
        (theirs(INPUTS) - TARGETS).square().mean().backward()
        adam.step()
        adam.zero_grad()
    fallen = [start - (m(INPUTS) - TARGETS).square().mean().item() for m in (ours, theirs)]
    assert fallen[0] == pytest.approx(fallen[1], rel=0.02)
