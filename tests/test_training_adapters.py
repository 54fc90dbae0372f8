"""Adapters: nothing at first, trained alone, saved by name, merged for export."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from native_worlds import tiny_model
from sortedrl.config.train import Lora
from sortedrl.errors import CheckpointError, ConfigError
from sortedrl.training.batch import TokenSequence
from sortedrl.training.checkpoint import save, write_tensors
from sortedrl.training.forward import AdapterReference, CopiedReference, PackedModel
from sortedrl.training.lora import (
    ADAPTER_FILE,
    MergedWeights,
    adapter_scale,
    adapters_among,
    add_adapters,
    export_model,
    load_adapters,
    merged_tensors,
    refuse_transposed_layers,
    trained_parameters,
)

SEQUENCES = [TokenSequence([4, 9, 30], [7, 8, 50, 2]), TokenSequence([3], [5])]


class NoTokenizer:
    """What the export of a model without text needs."""

    def save_pretrained(self, folder):
        assert folder.is_dir()


def adapted(*, seed=0, rank=2, is_moved=True, **more):
    """A tiny model with adapters, as if they had been trained."""
    model = tiny_model(std=0.3)
    add_adapters(model, Lora(rank=rank, **more), seed=seed)
    if is_moved:
        torch.manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in trained_parameters(model).values():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def logprobs(model):
    with torch.no_grad():
        return PackedModel(model).logprobs(SEQUENCES).logprobs_T


def saved(model, folder):
    save(
        folder,
        lambda partial: write_tensors(partial, ADAPTER_FILE, tensors=trained_parameters(model)),
    )
    return folder


def test_new_adapters_change_nothing_and_only_they_are_trained():
    model = adapted(is_moved=False)
    assert torch.equal(logprobs(model), logprobs(tiny_model(std=0.3)))
    names = trained_parameters(model)
    assert names
    assert all(".lora_" in name for name in names)
    assert not any("lm_head" in name for name in names), "the output layer has none"


def test_the_seed_decides_the_adapters():
    first, second, other = (
        trained_parameters(adapted(seed=seed, is_moved=False)) for seed in (1, 1, 2)
    )
    assert all(torch.equal(parameter, second[name]) for name, parameter in first.items())
    assert any(not torch.equal(parameter, other[name]) for name, parameter in first.items())


def test_other_random_numbers_stay_as_they_were():
    model = tiny_model()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    add_adapters(model, Lora(rank=2), seed=1)
    assert torch.equal(torch.rand(3), expected)


def test_folded_weights_compute_what_the_adapters_do():
    model, plain = adapted(), tiny_model(std=0.3)
    before = logprobs(plain)
    plain.load_state_dict(merged_tensors(model))
    torch.testing.assert_close(logprobs(plain), logprobs(model), atol=1e-5, rtol=0)
    assert (logprobs(plain) - before).abs().max() > 1e-2


def test_folding_leaves_the_adapters_as_they_are():
    model = adapted()
    before = logprobs(model)
    merged_tensors(model)
    assert torch.equal(logprobs(model), before)
    assert any(".lora_" in name for name, _ in model.named_parameters())


def test_an_exported_model_has_no_adapters(tmp_path):
    from transformers import AutoModelForCausalLM

    model = adapted(targets=("q_proj", "down_proj"))
    export_model(model, NoTokenizer(), tmp_path / "model")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert {path.suffix for path in (tmp_path / "model").iterdir()} == {".json", ".safetensors"}
    torch.testing.assert_close(logprobs(exported), logprobs(model), atol=1e-5, rtol=0)


def test_adapters_come_back_from_a_checkpoint_bit_for_bit(tmp_path):
    model = adapted()
    again = adapted(is_moved=False)
    load_adapters(again, saved(model, tmp_path / "update-000001"))
    assert torch.equal(logprobs(again), logprobs(model))


@pytest.mark.parametrize("other", [{"rank": 3}, {"targets": ("q_proj",)}])
def test_adapters_of_another_shape_are_refused(tmp_path, other):
    folder = saved(adapted(**other), tmp_path / "update-000001")
    with pytest.raises(CheckpointError, match="resume with the lora settings of its run"):
        load_adapters(adapted(), folder)


def test_layers_that_are_not_there_are_refused():
    with pytest.raises(ConfigError, match=r"lora\.targets"):
        add_adapters(tiny_model(), Lora(rank=2, targets=("nowhere",)), seed=0)


def test_layers_whose_adapters_could_not_be_folded_in_are_refused():
    with pytest.raises(ConfigError, match=r"must name linear layers, got model\.embed_tokens"):
        add_adapters(tiny_model(), Lora(rank=2, targets=("q_proj", "embed_tokens")), seed=0)


def test_the_reference_of_adapters_is_the_model_without_them():
    model = adapted()
    with_adapters = logprobs(model)
    packed = PackedModel(model, temperature=0.7)
    found = AdapterReference(packed).logprobs(SEQUENCES)
    copied = CopiedReference(tiny_model(std=0.3), temperature=0.7).logprobs(SEQUENCES)
    assert torch.equal(found, copied)
    assert not found.requires_grad
    assert torch.equal(logprobs(model), with_adapters), "and they are back afterwards"
    assert set(trained_parameters(model)) == set(trained_parameters(adapted()))


def test_weights_merged_one_by_one_are_those_that_are_merged_together():
    model, base = adapted(targets=("q_proj", "down_proj")), tiny_model(std=0.3).state_dict()
    adapters = {name: t.detach() for name, t in adapters_among(model.state_dict()).items()}
    found = MergedWeights(base, adapters, scale=adapter_scale(model))
    expected = merged_tensors(model)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.equal(expected[name]), name
    assert sum(not tensor.equal(base[name]) for name, tensor in found.items()) == 2 * 3


def test_layers_with_turned_weights_are_not_merged_by_name():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2))
    with pytest.warns(UserWarning, match="fan_in_fan_out"):
        add_adapters(model, Lora(rank=2, targets=("c_proj",)), seed=0)
    with pytest.raises(ConfigError, match=r"needs plain linear layers, got transformer\.h\.0"):
        refuse_transposed_layers(model)
