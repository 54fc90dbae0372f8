"""Packed, padded and one by one: the same log-probabilities and the same gradients.

Axes: T answer tokens of all sequences, B sequences, L positions of a padded text, V vocabulary.
"""

from dataclasses import fields
from functools import partial
from random import Random

import pytest
import torch
from peft import LoraConfig
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from native_worlds import CONTEXT, VOCABULARY, fresh_all, roll_out, shared_model, tiny_model
from sortedrl.engines.native import NativeEngine, Sampling
from sortedrl.errors import ModelError, RequestError
from sortedrl.training import attention as layers
from sortedrl.training import attention as packed_attention
from sortedrl.training.attention import checkpoint_layers
from sortedrl.training.batch import TokenSequence, packs
from sortedrl.training.forward import PackedModel

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def mistral():
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6, initializer_range=0.2))


MODELS = {
    "llama": lambda: tiny_model("llama"),
    "qwen2": lambda: tiny_model("qwen2", attention_bias=True),
    "qwen3": lambda: tiny_model("qwen3"),
    "gemma3": lambda: tiny_model("gemma3"),
    "mistral": mistral,
}


def texts(lengths, *, seed=0):
    random = Random(seed)

    def tokens(count):
        return [random.randrange(VOCABULARY) for _ in range(count)]

    return [TokenSequence(tokens(prompt), tokens(answer)) for prompt, answer in lengths]


SEQUENCES = texts([(3, 9), (1, 1), (12, 4), (2, 17), (7, 1), (1, 8)])


def plain(model, sequences, *, temperature=1.0):
    """Padded on the right, through the model's own forward, log_softmax over everything."""
    longest = max(len(s.prompt) + len(s.answer) for s in sequences)
    rows = [[*s.prompt, *s.answer] for s in sequences]
    ids_BL = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask_BL = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    logits_BLV = model(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False).logits
    logprobs_BLV = (logits_BLV / temperature).log_softmax(-1)
    entropies_BL = -(logprobs_BLV.exp() * logprobs_BLV).sum(-1)
    chosen_BL = logprobs_BLV[:, :-1].gather(-1, ids_BL[:, 1:, None])[..., 0]
    places = [slice(len(s.prompt) - 1, len(s.prompt) + len(s.answer) - 1) for s in sequences]
    pairs = list(enumerate(places))
    return (
        torch.cat([chosen_BL[row, place] for row, place in pairs]),
        torch.cat([entropies_BL[row, place] for row, place in pairs]),
    )


def gradients(model, logprobs_T, *, weights_T=None):
    """Of every trainable parameter, where every token counts differently."""
    if weights_T is None:
        weights_T = torch.linspace(-1, 2, len(logprobs_T))
    model.zero_grad()
    (logprobs_T * weights_T).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def assert_same_gradients(ours, theirs):
    assert ours.keys() == theirs.keys()
    scale = max(gradient.abs().max() for gradient in theirs.values())
    assert scale > 1e-3
    for name, gradient in theirs.items():
        gap = (ours[name] - gradient).abs().max()
        assert gap <= 1e-5 * max(gradient.abs().max(), 1e-2 * scale), name


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", MODELS)
def test_packed_padded_and_one_by_one_are_the_same(architecture, checkpointing):
    model = MODELS[architecture]().train()
    theirs_T, _ = plain(model, SEQUENCES)
    expected = gradients(model, theirs_T)
    if checkpointing:
        checkpoint_layers(model)
    packed = PackedModel(model)
    ours_T = packed.logprobs(SEQUENCES).logprobs_T
    torch.testing.assert_close(ours_T, theirs_T, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(model, ours_T), expected)
    alone_T = torch.cat([packed.logprobs([sequence]).logprobs_T for sequence in SEQUENCES])
    torch.testing.assert_close(alone_T, theirs_T, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(model, alone_T), expected)


def test_checkpointed_layers_are_really_repeated_in_the_backward_pass():
    model = tiny_model("llama").train()
    packed = PackedModel(model)
    calls = []
    model.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for checkpointing, expected in ((False, 1), (True, 2)):
        if checkpointing:
            checkpoint_layers(model)
        calls.clear()
        packed.logprobs(SEQUENCES).logprobs_T.sum().backward()
        assert len(calls) == expected


def test_gradients_accumulated_over_packs_are_those_of_the_whole():
    model = tiny_model("qwen2")
    packed = PackedModel(model)
    whole = gradients(model, packed.logprobs(SEQUENCES).logprobs_T)
    weights = torch.linspace(-1, 2, sum(len(s.answer) for s in SEQUENCES))
    weights = weights.split([len(s.answer) for s in SEQUENCES])
    model.zero_grad()
    cut = packs([s.num_rows for s in SEQUENCES], budget=20)
    assert len(cut) > 2
    for pack in cut:
        logprobs_T = packed.logprobs([SEQUENCES[i] for i in pack.indices]).logprobs_T
        (logprobs_T * torch.cat([weights[i] for i in pack.indices])).sum().backward()
    assert_same_gradients({n: p.grad for n, p in model.named_parameters()}, whole)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_temperature_and_entropy_are_those_of_the_plain_way(temperature):
    model = tiny_model("llama")
    scored = PackedModel(model, temperature=temperature).logprobs(SEQUENCES, with_entropy=True)
    theirs = plain(model, SEQUENCES, temperature=temperature)
    torch.testing.assert_close(
        (scored.logprobs_T, scored.entropies_T), theirs, rtol=1e-5, atol=1e-5
    )
    both = gradients(model, torch.cat([scored.logprobs_T, scored.entropies_T]))
    assert_same_gradients(both, gradients(model, torch.cat(theirs)))
    assert PackedModel(model).logprobs(SEQUENCES).entropies_T is None


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_the_engine_and_the_trainer_agree(architecture):
    model = shared_model(architecture)
    engine = NativeEngine(model, slots=3, max_tokens=24, sampling=Sampling(temperature=0.8))
    answers = roll_out(engine, fresh_all([3, 9, 4, 6], samples=2))
    with torch.no_grad():
        ours = PackedModel(model, temperature=0.8).logprobs(
            [TokenSequence(t.prompt.tokens, t.tokens) for t in answers]
        )
    sampled_T = torch.tensor([value for t in answers for value in t.logprobs])
    torch.testing.assert_close(ours.logprobs_T, sampled_T, rtol=0, atol=1e-4)


def test_hidden_states_are_those_that_predict_the_answer_tokens():
    model = tiny_model("llama")
    hidden_TD = PackedModel(model).hidden(SEQUENCES)
    expected = [
        model.base_model(input_ids=torch.tensor([[*s.prompt, *s.answer]])).last_hidden_state[
            0, len(s.prompt) - 1 : -1
        ]
        for s in SEQUENCES
    ]
    torch.testing.assert_close(hidden_TD, torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_are_trained_and_nothing_else(checkpointing):
    model = tiny_model("qwen2").train()
    model.add_adapter(
        LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    if checkpointing:
        checkpoint_layers(model)
    ours = gradients(model, PackedModel(model).logprobs(SEQUENCES).logprobs_T)
    assert len(ours) == 2 * 2 * 3
    assert all("lora" in name for name in ours)
    assert_same_gradients(ours, gradients(model, plain(model.eval(), SEQUENCES)[0]))


def test_an_adapter_on_the_output_layer_is_refused():
    model = tiny_model("llama")
    model.add_adapter(LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ModelError, match="output layer"):
        PackedModel(model)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_off_as_it_is_in_rollout(checkpointing):
    torch.manual_seed(0)
    config = MistralConfig(**SIZES, attention_dropout=0.5, initializer_range=0.2)
    model = MistralForCausalLM(config).train()
    model.add_adapter(
        LoraConfig(r=3, target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False)
    )
    if checkpointing:
        checkpoint_layers(model)
    packed = PackedModel(model)
    once, again = (gradients(model, packed.logprobs(SEQUENCES).logprobs_T) for _ in range(2))
    for name, gradient in once.items():
        assert torch.equal(gradient, again[name])
    ours_T = packed.logprobs(SEQUENCES).logprobs_T
    assert any(isinstance(m, torch.nn.Dropout) and m.training for m in model.modules())
    torch.testing.assert_close(ours_T, plain(model.eval(), SEQUENCES)[0], rtol=1e-5, atol=1e-5)


def test_the_model_is_left_as_it_was_also_after_an_error():
    model = tiny_model("llama").train()
    checkpoint_layers(model)
    before = model.config._attn_implementation
    layers = list(model.base_model.layers)
    forwards = [layer.forward for layer in layers]

    def as_it_was():
        are_checkpointed = all(layer.gradient_checkpointing for layer in layers)
        has_own = [layer.forward for layer in layers] == forwards
        is_set = model.config._attn_implementation == before and model.training
        return are_checkpointed and has_own and is_set

    packed = PackedModel(model)
    assert as_it_was()
    logprobs_T = packed.logprobs(SEQUENCES).logprobs_T
    assert as_it_was()
    logprobs_T.sum().backward()
    assert as_it_was()

    def fail(*_):
        assert model.config._attn_implementation != before
        raise RuntimeError("out of memory")

    hook = model.base_model.layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        packed.logprobs(SEQUENCES)
    hook.remove()
    assert as_it_was()
    assert not model.lm_head._forward_hooks


@pytest.mark.parametrize(
    "sequences", [[], [TokenSequence([], [1, 2])], [SEQUENCES[0], TokenSequence([1], [])]]
)
def test_without_a_token_before_the_answer_or_without_an_answer_nothing_can_be_said(sequences):
    packed = PackedModel(shared_model("llama"))
    with pytest.raises(RequestError, match="must"):
        packed.logprobs(sequences)


def test_models_that_change_their_logits_are_refused():
    granite = GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0))
    cohere = CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.5))
    for model in (granite, cohere):
        with pytest.raises(ModelError, match="changes its logits"):
            PackedModel(model)
    unscaled = GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=1.0))
    PackedModel(unscaled)


def test_models_with_another_attention_are_refused():
    gemma = Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=None))
    with pytest.raises(ModelError, match="capped scores"):
        PackedModel(gemma)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    with pytest.raises(ModelError, match="dynamic"):
        PackedModel(tiny_model("llama", rope_parameters=rope))


def test_a_model_with_learned_positions_is_packed_too():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=24,
        n_layer=2,
        n_head=3,
        n_positions=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.2,
    )
    model = GPT2LMHeadModel(config).train()
    ours_T = PackedModel(model).logprobs(SEQUENCES).logprobs_T
    torch.testing.assert_close(ours_T, plain(model.eval(), SEQUENCES)[0], rtol=1e-5, atol=1e-5)


def documented_varlen(q_RHD, k_RKD, v_RKD, starts, ends, *_, scale, window_size, enable_gqa=False):
    """What torch says of its kernel, which only a GPU can run."""
    if not enable_gqa:
        assert q_RHD.shape == k_RKD.shape
    assert torch.equal(starts, ends)
    attended = []
    for start, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        q, k, v = (x[start:end].transpose(0, 1) for x in (q_RHD, k_RKD, v_RKD))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        left, right = window_size
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen = (distance >= -right) & ((distance <= left) if left >= 0 else True)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
        attended.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(attended)


@pytest.mark.parametrize("shares_heads", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_is_asked_for_what_is_computed_one_by_one(monkeypatch, shares_heads, window):
    monkeypatch.setattr(packed_attention, "_VARLEN_SHARES_HEADS", shares_heads)
    monkeypatch.setattr(packed_attention, "varlen_attn", documented_varlen)
    torch.manual_seed(0)
    row = packed_attention.Row.of([4, 1, 9], device=torch.device("cpu"))
    q, k, v = torch.randn(1, 6, 14, 8), torch.randn(1, 2, 14, 8), torch.randn(1, 2, 14, 8)
    both = [
        attend(q, k, v, row, scale=0.3, window=window)
        for attend in (packed_attention._by_kernel, packed_attention._one_by_one)
    ]
    torch.testing.assert_close(*both)


def test_a_row_is_made_of_tensors_alone_as_layers_would_be_compiled_for_every_other_number():
    row = packed_attention.Row.of([4, 1, 9], device=torch.device("cpu"))
    assert [type(getattr(row, field.name)) for field in fields(row)] == [torch.Tensor] * 3
    assert row.lengths == [4, 1, 9]
    assert len(row.longest_L0) == 9


@pytest.mark.filterwarnings("ignore")  # of torch.compile, about itself
def test_compiled_layers_are_the_same_when_the_backward_pass_repeats_them(monkeypatch):
    compile_with = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(layers.torch, "compile", compile_with)
    model = tiny_model("llama", num_hidden_layers=2).train()
    plain = gradients_of(PackedModel(model))
    checkpoint_layers(model)
    repeated = gradients_of(PackedModel(model, is_compiled=True))
    for name, gradient in plain.items():
        torch.testing.assert_close(repeated[name], gradient)


@torch.library.custom_op("sortedrl_tests::varlen", mutates_args=())
def opaque_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    left: int,
) -> torch.Tensor:
    """As a compiler sees the kernel: an operator of tensors and sizes."""
    assert longest == bounds.diff().max()
    window = (left, 0)
    return documented_varlen(
        q, k, v, bounds, bounds, scale=scale, window_size=window, enable_gqa=True
    ).contiguous()


@opaque_varlen.register_fake
def _(q, k, v, bounds, longest, scale, left):
    return torch.empty_like(q)


@pytest.mark.filterwarnings("ignore")  # of torch.compile, about itself
def test_a_compiled_layer_is_one_graph_for_rows_of_all_lengths(monkeypatch):
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph

    def varlen(q, k, v, bounds, _, longest, __, *, scale, window_size, enable_gqa):
        return opaque_varlen(q, k, v, bounds, longest, scale, window_size[0])

    torch._dynamo.reset()
    monkeypatch.setattr(layers.torch, "compile", partial(torch.compile, backend=counted))
    monkeypatch.setattr(packed_attention, "varlen_attn", varlen)
    monkeypatch.setattr(packed_attention, "_VARLEN_SHARES_HEADS", True)
    monkeypatch.setattr(packed_attention, "_one_by_one", packed_attention._by_kernel)
    model = tiny_model("llama", num_hidden_layers=3).eval()
    packed = PackedModel(model, is_compiled=True)
    with torch.no_grad():
        for lengths in ((5, 4), (7, 2, 4), (12, 11), (4, 6, 9, 30)):
            found = packed.logprobs([TokenSequence([1], list(range(n))) for n in lengths])
            assert len(found.logprobs_T) == sum(lengths)
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore")  # of torch.compile, about itself
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("has_adapters", [False, True])
def test_updates_need_one_graph_for_all_layers(monkeypatch, checkpointing, has_adapters):
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph

    def over_the_row(q, k, v, row, *, scale, window):
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return attended.transpose(1, 2)

    torch._dynamo.reset()
    monkeypatch.setattr(layers.torch, "compile", partial(torch.compile, backend=counted))
    model = tiny_model("llama", num_hidden_layers=3, num_key_value_heads=6).train()
    if has_adapters:
        model.add_adapter(LoraConfig(r=3, target_modules="all-linear"))
    if checkpointing:
        checkpoint_layers(model)
    packed = PackedModel(model, is_compiled=True)
    assert not graphs, "what the model computes is compared without them"
    monkeypatch.setattr(packed_attention, "_one_by_one", over_the_row)
    for lengths in ((5, 4), (7, 2, 4), (4, 6, 9, 30)):
        sequences = [TokenSequence([1], list(range(n))) for n in lengths]
        packed.logprobs(sequences).logprobs_T.sum().backward()
    assert len(graphs) == 1
    with torch.no_grad():
        packed.logprobs(sequences)
    assert len(graphs) == 2, "one more for passes without gradients"
    assert not model.get_input_embeddings()._forward_hooks or checkpointing


def gradients_of(packed):
    packed.model.zero_grad()
    scored = packed.logprobs([TokenSequence([1, 2], [3, 4]), TokenSequence([5], [6])])
    scored.logprobs_T.sum().backward()
    return {name: weight.grad.clone() for name, weight in packed.model.named_parameters()}
