"""Models and tokenizers by name, the model made from nothing, and sizes without weights."""

import json
import struct

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    T5Config,
)

import native_worlds
from knights_reading import ALPHABET, split_symbols
from sortedrl.data.catalogue import open_task
from sortedrl.data.rows import Row
from sortedrl.data.stream import rendered
from sortedrl.engines.native import NativeEngine
from sortedrl.errors import ConfigError, ModelError
from sortedrl.models.loading import (
    load_model,
    load_tokenizer,
    model_without_weights,
    names_by_tensor,
    stored_weights,
    weights_of,
)
from sortedrl.models.shape import _short, gguf_config, shape_of, shape_of_config
from sortedrl.models.tiny import TinySettings, is_tiny, tiny_model, tiny_settings, tiny_tokenizer
from sortedrl.rewards.tags import TAGS

# Products this small are slower on two threads, many times so if others want the cores too.
torch.set_num_threads(1)

TINY = "tiny:hidden=32,layers=2,heads=2,context=128"
TOKENIZER = tiny_tokenizer()


def plain_tokenizer(folder):
    """A tokenizer of words, without a pad token and without a chat template."""
    tokenizer = Tokenizer(
        models.WordLevel({"?": 0, "who": 1, "lies": 2, "<end>": 3}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    return folder


@given(st.text())
def test_every_text_comes_back_from_its_tokens(text):
    tokens = TOKENIZER.encode(text, add_special_tokens=True)
    assert TOKENIZER.decode(tokens) == text
    assert all(0 <= token < len(TOKENIZER) for token in tokens)


@given(st.lists(st.sampled_from(ALPHABET)).map("".join))
def test_a_compact_text_has_as_many_tokens_as_symbols(text):
    assert len(TOKENIZER.encode(text)) == len(split_symbols(text))


def test_the_prompts_and_traces_of_compact_puzzles_have_as_many_tokens_as_symbols():
    task = open_task("knights_knaves:people=3-5,count=20,style=compact")
    for row in task.rows:
        tokens = rendered(row, TOKENIZER, chat="auto").tokens
        assert len(tokens) == len(split_symbols(row.prompt))
        trace = str(row.fields["response"])
        assert len(TOKENIZER.encode(trace)) == len(split_symbols(trace))


def test_tags_are_single_tokens_that_stay_in_the_text_and_the_end_is_not():
    tokens = [TOKENIZER.encode(tag) for tag in TAGS]
    assert [len(one) for one in tokens] == [1] * len(TAGS)
    ended = [*TOKENIZER.encode("<think>x</think>"), TOKENIZER.eos_token_id]
    assert TOKENIZER.decode(ended, skip_special_tokens=True) == "<think>x</think>"


def test_a_byte_has_its_own_number():
    assert TOKENIZER.encode("Aé\n") == [*"Aé\n".encode()]


def test_a_tiny_model_and_its_tokenizer_come_back_from_a_folder(tmp_path):
    model, tokenizer = load_model(TINY, dtype=None, device="cpu"), load_tokenizer(TINY)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    same = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, same.state_dict()[name]), name
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "<think>#aB , é日</think> x"
    assert again.encode(text) == tokenizer.encode(text)
    assert load_tokenizer(tmp_path).decode(again.encode(text)) == text
    assert same.generation_config.eos_token_id == again.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)


def test_the_seed_alone_decides_the_weights_and_nothing_else_is_disturbed():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = tiny_model(TinySettings(hidden=32, layers=1, heads=2))
    assert torch.equal(torch.rand(3), expected)
    second = tiny_model(TinySettings(hidden=32, layers=1, heads=2))
    other = tiny_model(TinySettings(hidden=32, layers=1, heads=2, seed=1))
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.lm_head.weight is first.model.embed_tokens.weight


def test_a_tiny_model_stops_at_its_own_end_and_only_there():
    model = load_model(TINY, dtype=None, device="cpu")
    engine = NativeEngine(model, slots=32, max_tokens=40, tokenizer=load_tokenizer(TINY))
    answers = engine.generate(["A:b?"], samples_per_prompt=32, progress=False)
    is_ended = [answer.tokens[-1] == TOKENIZER.eos_token_id for answer in answers]
    assert [answer.finish_reason == "stop" for answer in answers] == is_ended
    assert any(is_ended)


def test_a_tiny_model_takes_the_precision_it_is_asked_for():
    model = load_model(TINY, dtype=torch.bfloat16, device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_tiny_model_in_16_bits_computes_the_same_once_it_is_saved_and_loaded(tmp_path):
    model = load_model(TINY, dtype=torch.bfloat16, device="cpu")
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path, dtype=torch.bfloat16, device="cpu")
    buffers = dict(again.named_buffers())
    for name, buffer in model.named_buffers():
        assert buffers[name].dtype == buffer.dtype, name
        assert buffers[name].equal(buffer), name
    tokens = torch.arange(60)[None] % model.config.vocab_size
    with torch.no_grad():
        assert model(tokens).logits.equal(again(tokens).logits)


def test_a_spec_names_the_sizes():
    assert tiny_settings("tiny") == TinySettings()
    assert tiny_settings("tiny:hidden=64,seed=3") == TinySettings(hidden=64, seed=3)
    names = ("tiny", "tiny:seed=1", "tinyllama", "./tiny")
    assert [is_tiny(name) for name in names] == [True, True, False, False]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("tiny:hiden=64", "did you mean 'hidden'"),
        ("tiny:hidden=many", "must be a number"),
        ("tiny:hidden=30,heads=4", "multiple of twice the heads"),
        ("tiny:layers=0", "layers must be at least 1"),
        ("tiny:seed=-1", "seed must lie in"),
        ("tiny:64", "option=value"),
    ],
)
@pytest.mark.parametrize("load", [load_tokenizer, shape_of])
def test_a_spec_that_cannot_work_is_refused(spec, words, load):
    with pytest.raises(ConfigError, match=words):
        load(spec)


def test_a_tokenizer_without_pad_token_and_chat_template_is_as_good_as_any(tmp_path):
    tokenizer = load_tokenizer(plain_tokenizer(tmp_path))
    assert tokenizer.pad_token_id is None
    assert tokenizer.chat_template is None
    row = Row(prompt="who lies", fields={}, place="here:1")
    assert rendered(row, tokenizer, chat="auto").tokens == [1, 2]
    config = LlamaConfig(
        vocab_size=4,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=3,
    )
    engine = NativeEngine(LlamaForCausalLM(config), slots=2, max_tokens=3, tokenizer=tokenizer)
    assert len(engine.generate(["who lies", "who"], progress=False)) == 2


def load_weights(folder):
    return load_model(folder, dtype=None, device="cpu")


@pytest.mark.parametrize("load", [load_weights, load_tokenizer, shape_of])
def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_name(load, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    for name in (tmp_path / "nothing", "./nothing/", "~/nothing", "a/b/c", tmp_path / "no.gguf"):
        with pytest.raises(ModelError, match="no such file or folder; give the folder of a model"):
            load(str(name))
    with pytest.raises(ModelError, match="nor is there a folder runs/nothing"):
        load("runs/nothing")


def test_what_is_no_causal_language_model_is_refused_in_one_line(tmp_path):
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is not a causal language model") as caught:
        shape_of(tmp_path)
    assert len(str(caught.value)) < 400


def keep_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change(**values):
    def damage(path):
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return damage


@pytest.mark.parametrize(
    ("name", "damage", "loads"),
    [
        ("model.safetensors", keep_half, [load_weights]),
        ("config.json", keep_half, [load_weights, shape_of]),
        ("config.json", change(num_hidden_layers=True), [load_weights, shape_of]),
        ("config.json", change(hidden_size=-16), [load_weights, shape_of]),
        ("config.json", change(hidden_size=2**70), [load_weights, shape_of]),
        ("config.json", change(num_attention_heads=0), [load_weights, shape_of]),
        ("config.json", change(hidden_act="\0"), [load_weights, shape_of]),
        ("config.json", change(pad_token_id=2**31), [load_weights, shape_of]),
        ("tokenizer.json", keep_half, [load_tokenizer]),
        ("tokenizer.json", change(padding=0.5), [load_tokenizer]),
        ("tokenizer_config.json", change(model_max_length={}), [load_tokenizer]),
    ],
)
def test_a_damaged_model_is_refused_in_one_sentence(name, damage, loads, tmp_path):
    tiny_model(TinySettings(hidden=32, layers=1, heads=2, context=64)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    damage(tmp_path / name)
    for load in loads:
        with pytest.raises(ModelError, match=r"cannot|has no|is not") as caught:
            load(tmp_path)
        assert "\n" not in str(caught.value)


def test_a_broken_gguf_file_is_refused(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + struct.pack("<I", 3))
    with pytest.raises(ModelError, match="cannot read"):
        shape_of(tmp_path / "broken.gguf")


def test_the_shape_of_tiny_is_that_of_the_model():
    shape, model = shape_of(TINY), load_model(TINY, dtype=None, device="cpu")
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads) == (2, 32, 2, 2)
    assert (shape.vocabulary, shape.context, shape.is_tied) == (len(TOKENIZER), 128, True)
    assert shape.output_parameters == 0


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        # The published counts of SmolLM2-135M, Qwen2.5-7B and Llama-3.1-8B.
        (
            LlamaConfig(
                vocab_size=49152,
                hidden_size=576,
                intermediate_size=1536,
                num_hidden_layers=30,
                num_attention_heads=9,
                num_key_value_heads=3,
                tie_word_embeddings=True,
            ),
            134_515_008,
        ),
        (
            Qwen2Config(
                vocab_size=152064,
                hidden_size=3584,
                intermediate_size=18944,
                num_hidden_layers=28,
                num_attention_heads=28,
                num_key_value_heads=4,
            ),
            7_615_616_512,
        ),
        (
            LlamaConfig(
                vocab_size=128256,
                hidden_size=4096,
                intermediate_size=14336,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=8,
            ),
            8_030_261_248,
        ),
    ],
    ids=["smollm2-135m", "qwen2.5-7b", "llama-3.1-8b"],
)
def test_parameters_are_counted_exactly_and_without_memory(config, parameters, tmp_path):
    shape = shape_of_config(config, name="as published")
    assert shape.parameters == parameters
    config.save_pretrained(tmp_path)
    assert shape_of(tmp_path).parameters == parameters


def test_a_gguf_file_gives_its_shape_from_its_header(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_vocab_size(100)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    shape = shape_of(tmp_path / "small.gguf")
    assert (shape.layers, shape.hidden, shape.inner, shape.kv_heads) == (2, 32, 48, 2)
    assert (shape.vocabulary, shape.context) == (100, 64)


def test_the_config_of_a_gguf_header_is_that_of_the_whole_file(gguf_file):
    whole = AutoConfig.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    assert gguf_config(gguf_file).to_dict() == whole.to_dict()


def test_a_long_vocabulary_is_counted_and_not_parsed(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "long.gguf", "llama")
    for add, value in (
        (writer.add_context_length, 256),
        (writer.add_embedding_length, 64),
        (writer.add_block_count, 2),
        (writer.add_feed_forward_length, 128),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 2),
        (writer.add_layer_norm_rms_eps, 1e-5),
    ):
        add(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{number}" for number in range(5000)])
    writer.add_eos_token_id(7)
    writer.add_tensor("output.weight", numpy.zeros((4, 4), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole = AutoConfig.from_pretrained(tmp_path, gguf_file="long.gguf").to_dict()
    short = gguf_config(tmp_path / "long.gguf")
    assert short.vocab_size == 5000
    assert short.to_dict() == whole
    assert len(_short(tmp_path / "long.gguf")) < 2000


def test_a_model_on_a_gpu_by_its_number_makes_that_gpu_current(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    monkeypatch.setattr(torch.nn.Module, "to", lambda model, *where: model)
    load_model("tiny", dtype=torch.float32, device="cuda:1")
    assert asked == [torch.device("cuda:1")]


def test_a_gguf_file_is_a_plain_model_that_can_be_saved_and_comes_back(gguf_file, tmp_path):
    model, tokenizer = load_model(gguf_file, dtype=None, device="cpu"), load_tokenizer(gguf_file)
    assert all(parameter.is_floating_point() for parameter in model.parameters())
    assert {p.requires_grad for p in model.parameters()} == {True}
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert "quant" not in (tmp_path / "config.json").read_text()
    again = load_model(tmp_path, dtype=None, device="cpu")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    text = "who lies, the first? é<end>"
    assert load_tokenizer(tmp_path).encode(text) == tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tokenizer_of_a_gguf_file_ends_answers_as_the_file_says(gguf_file):
    tokenizer = load_tokenizer(gguf_file)
    model = load_model(gguf_file, dtype=None, device="cpu")
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<end>", "<begin>")
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 2


def test_a_gguf_file_cut_anywhere_is_refused_in_words(gguf_file, tmp_path):
    whole, broken = gguf_file.read_bytes(), tmp_path / "broken.gguf"
    for share in (0, 0.01, 0.1, 0.5):
        broken.write_bytes(whole[: int(share * len(whole))])
        for load in (
            shape_of,
            load_tokenizer,
            lambda name: load_model(name, dtype=None, device="cpu"),
        ):
            with pytest.raises(ModelError, match=r"broken\.gguf"):
                load(broken)


def test_a_quantized_model_is_refused_before_its_weights_are_read(tmp_path):
    config = LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    config.save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"must have unquantized weights, got weights quantized with 'gptq'"
    ):
        load_model(tmp_path, dtype=None, device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["llama", "qwen3", "gemma3", "gguf", "tiny"])
def test_a_model_without_weights_is_the_model_but_for_its_weights(what, dtype, tmp_path, request):
    name = TINY
    if what == "gguf":
        name = request.getfixturevalue("gguf_file")
    elif what != "tiny":
        name = tmp_path / "model"
        native_worlds.tiny_model(what).save_pretrained(name, max_shard_size="50KB")
    whole = load_model(name, dtype=dtype, device="cpu")
    empty = model_without_weights(name, dtype=dtype)
    own, expected = (model.state_dict(keep_vars=True) for model in (empty, whole))
    assert all(weight.is_meta for weight in own.values())
    assert names_by_tensor(own) == names_by_tensor(expected)
    for weight, tensor in expected.items():
        assert (own[weight].shape, own[weight].dtype) == (tensor.shape, tensor.dtype), weight
    buffers = dict(empty.named_buffers())
    for buffer, tensor in whole.named_buffers():
        assert buffers[buffer].equal(tensor), buffer
    assert empty.generation_config.eos_token_id == whole.generation_config.eos_token_id
    assert [m.training for m in empty.modules()] == [m.training for m in whole.modules()]
    found = weights_of(name, dtype=dtype)
    for names in names_by_tensor(expected):
        assert found[names[0]].equal(expected[names[0]]), names[0]
    stored = stored_weights(name, own, dtype=dtype)
    assert (stored is None) == (what in ("gguf", "tiny"))
    if stored is not None:
        weight = "model.norm.weight"
        assert stored.rows(weight, 3, 7).equal(expected[weight][3:7])
