"""The model `tiny`: a small Llama with a byte tokenizer, built from a spec.

    tiny
    tiny:hidden=128,layers=3,heads=4,context=1024,seed=0

Nothing is downloaded; the spec determines every weight. A folder of that name is `./tiny`.

The tokenizer has one token per byte, with the byte as its id, one per tag of the compact puzzles,
and `<pad>` and `<eos>`. It can encode any text, and a compact puzzle has as many tokens as symbols.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sortedrl.config.checks import require
from sortedrl.config.parsing import parsed, settings_of
from sortedrl.rewards.tags import TAGS

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NAME = "tiny"
_NUM_BYTES = 256
_PAD, _EOS = "<pad>", "<eos>"
_PAD_ID, _EOS_ID = _NUM_BYTES + len(TAGS), _NUM_BYTES + len(TAGS) + 1
_VOCABULARY = _EOS_ID + 1
_INNER_MULTIPLE = 32
_MOST_SQUARES = 2**26
_MOST_CONTEXT = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySettings:
    """The sizes of a tiny model."""

    hidden: int = 128
    """Width of the layers; a multiple of twice the heads."""
    layers: int = 3
    """Number of layers."""
    heads: int = 4
    """Attention heads of each layer."""
    context: int = 1024
    """Context length: prompt and answer tokens."""
    seed: int = 0
    """Seed of the initial weights."""

    def __post_init__(self) -> None:
        """Validate the values."""
        for name, value in (
            ("hidden", self.hidden),
            ("layers", self.layers),
            ("heads", self.heads),
            ("context", self.context),
        ):
            require(value >= 1, f"tiny: {name} must be at least 1, got {value}")
        require(
            self.hidden % (2 * self.heads) == 0,
            f"tiny: hidden must be a multiple of twice the heads ({2 * self.heads}), because each "
            f"head rotates pairs of dimensions, got {self.hidden}",
        )
        require(
            self.layers * self.hidden**2 <= _MOST_SQUARES and self.context <= _MOST_CONTEXT,
            "tiny: layers * hidden * hidden must be at most "
            f"{_MOST_SQUARES:,} and context at most {_MOST_CONTEXT:,}, got {self.layers} layers, "
            f"hidden {self.hidden} and context {self.context}; load a model that is not tiny",
        )
        require(0 <= self.seed < 2**63, f"tiny: seed must lie in 0..{2**63 - 1:,}, got {self.seed}")

    @property
    def inner(self) -> int:
        """Width of the MLP: 8/3 of the hidden width, as in other gated models, rounded up."""
        return -(-8 * self.hidden // (3 * _INNER_MULTIPLE)) * _INNER_MULTIPLE


def is_tiny(name: str) -> bool:
    """Whether a model's name is a `tiny` spec."""
    return name == NAME or name.startswith(f"{NAME}:")


def tiny_settings(spec: str) -> TinySettings:
    """The sizes of a spec."""
    _, options = parsed(spec, what="model")
    return settings_of(TinySettings, options, called=f"model {spec!r}")


def tiny_config(settings: TinySettings) -> LlamaConfig:
    """The sizes as a transformers config."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=settings.hidden,
        intermediate_size=settings.inner,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        max_position_embeddings=settings.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=_EOS_ID,
        pad_token_id=_PAD_ID,
    )


def tiny_model(settings: TinySettings) -> LlamaForCausalLM:
    """The initial model, in fp32 on the CPU; the global random state is preserved."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=()), torch.device("cpu"):
        # torch.manual_seed would seed the GPUs too.
        torch.default_generator.manual_seed(settings.seed)
        return LlamaForCausalLM(tiny_config(settings))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of bytes and tags, the same for every size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: byte for byte, letter in enumerate(_byte_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Tags are ordinary tokens: rewards read them in the decoded text.
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    tokenizer.add_special_tokens([_PAD, _EOS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        eos_token=_EOS,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def _byte_letters() -> list[str]:
    """The letter of each byte in a byte-level tokenizer.

    Printable Latin-1 bytes stand for themselves, the others take the letters from 256 on, in order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(_NUM_BYTES, 2 * _NUM_BYTES))
    return [chr(byte if byte in printable else next(others)) for byte in range(_NUM_BYTES)]
