"""A model's folder with a tokenizer of sixty words, and no weights."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

VOCABULARY = 60
STOP, START = 1, 2
_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}<start>"


def write_model(folder: Path) -> Path:
    """A folder that verl takes a tokenizer and a model's configuration from."""
    words = ["<pad>", "<stop>", "<start>", "<unk>", *(f"w{n}" for n in range(VOCABULARY - 4))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<stop>", unk_token="<unk>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<start>"]})
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=16,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return folder
