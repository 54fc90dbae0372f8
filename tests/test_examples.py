"""The examples run as they are shown."""

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from native_worlds import tiny_model

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model on disk that speaks in numbers."""
    words = {str(number): number for number in range(128)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    tiny_model(eos_token_id=7).save_pretrained(path)
    return path


def test_generate_writes_two_answers_to_each_prompt(folder):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "generate.py", folder, "1 2 3", "4 5"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("> 1 2 3\n") == done.stdout.count("> 4 5\n") == 2
    assert done.stdout.count(" tokens, ") == 4
    assert "4/4 answers" in done.stderr


def test_a_reward_of_ones_own_is_tried_out_and_a_call_that_hangs_is_ended():
    done = subprocess.run(
        [sys.executable, EXAMPLES / "own_reward.py"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["0.991", "scored"],
        ["-0.017", "scored"],
        ["-1.000", "timeout"],
    ]
    assert "it took more than 1 seconds; the answer gets the reward -1" in done.stderr
