"""Whole runs in small: a model whose answers differ in length, a dense reward, and a nursery."""

import json
import os
import signal
import time
from pathlib import Path

from forked import Forked, command
from sortedrl.core.files import read_metrics
from sortedrl.training.checkpoint import verify

TASK = "knights_knaves:people=2-3,count=24,style=compact"
STOPS = range(128, 152)
"""Bytes that end an answer, so that one has some ten tokens."""
PATIENCE_SECONDS = 600
_REWARD = '''"""Letters are good."""

import pathlib
import time


def letters(prompt, response):
    time.sleep(0.01)
    return sum(letter.isascii() and letter.isalpha() for letter in response) / (1 + len(response))


def slow(prompt, response):
    time.sleep(0.2)
    return letters(prompt, response)


def held(prompt, response):
    """Takes its time while there is a file `held` beside this one."""
    if pathlib.Path(__file__).with_name("held").exists():
        time.sleep(2)
    return letters(prompt, response)


def rarely(prompt, response):
    return float(letters(prompt, response) > 0.3)


CALLS = []


def scripted(prompt, response, right=()):
    CALLS.append(response)
    return {"reward": letters(prompt, response), "correct": len(CALLS) in right}


def parts(prompt, response):
    found = {"letters": letters(prompt, response), "length": len(response) / 100}
    return {"reward": sum(found.values()), **found}


def nothing(prompt, response):
    return float("nan")
'''


def write_world(folder, *, stops=STOPS, hidden=32, seed=0):
    """Put a model and a file of rewards into a folder."""
    from sortedrl.models.tiny import TinySettings, tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    model = tiny_model(TinySettings(hidden=hidden, layers=1, heads=2, context=256, seed=seed))
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *stops]
    model.save_pretrained(folder / "begun")
    tokenizer.save_pretrained(folder / "begun")
    (folder / "judge.py").write_text(_REWARD)


def write_gguf(path, *, seed=0):
    """Write a small Llama as a GGUF file: its matrices packed in 8 bits, a byte-level tokenizer.

    As in files of real models, the begin token and the end token differ.
    """
    import gguf
    import numpy as np
    from tokenizers.pre_tokenizers import ByteLevel

    hidden, inner, heads, layers = 32, 64, 2, 2
    letters = sorted(ByteLevel.alphabet())
    tokens = ["<unk>", "<begin>", "<end>", *letters, "Ġt", "he"]
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_vocab_size(len(tokens))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ġ t", "h e"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(seed)
    matrices = {"token_embd": (len(tokens), hidden)}
    for layer in range(layers):
        matrices |= {f"blk.{layer}.attn_{part}": (hidden, hidden) for part in "qkv"}
        matrices[f"blk.{layer}.attn_output"] = (hidden, hidden)
        matrices |= {f"blk.{layer}.ffn_{part}": (inner, hidden) for part in ("gate", "up")}
        matrices[f"blk.{layer}.ffn_down"] = (hidden, inner)
        for part in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{part}.weight", np.ones(hidden, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    packed = gguf.GGMLQuantizationType.Q8_0
    for name, shape in matrices.items():
        values = random.normal(0, 0.1, shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, packed), raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def run_words(out, *more, task=TASK, reward="letters", model="begun"):
    """The words of a run of seconds, in a folder with a world; later words win."""
    return later_wins(
        *("train", "--model", model, "--task", task, "--reward", f"judge.py:{reward}"),
        *("--out", str(out), "--threads", "1", "--device", "cpu", "--rewards.workers", "1"),
        *("--engine.slots", "6", "--engine.max-tokens", "32"),
        *("--schedule.group-prompts", "8", "--schedule.update-batch", "4"),
        *("--optimiser.learning-rate", "1e-2", "--saving.every", "1"),
        *more,
    )


def later_wins(*words):
    """The words of a command in which each flag is given once, with its last value."""
    groups = []
    for word in map(str, words):
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    last = {group[0].partition("=")[0].replace("_", "-"): group for group in groups}
    return [word for group in last.values() for word in group]


def said(capsys, words, *, code=0):
    """Run a command here, which must end with this code; gives what it said on both streams."""
    from sortedrl.cli import main

    try:
        found = main([str(word) for word in words])
    except SystemExit as stop:
        found = stop.code
    out, err = capsys.readouterr()
    assert found == code, err
    return out, err


def weights(out):
    """The bytes of the trained model."""
    return (Path(out) / "model" / "model.safetensors").read_bytes()


def events(out):
    """What happened, but for times and for where it was taken up again."""
    rows = [json.loads(line) for line in (Path(out) / "events.jsonl").read_text().splitlines()]
    timeless = [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]
    for row in timeless:
        if row["event"] == "score":
            row["scored"] = [scored[:3] for scored in row["scored"]]
    return [row for row in timeless if row["event"] != "resume"]


def answers(out):
    """The answers that were kept as text."""
    return (Path(out) / "answers.jsonl").read_bytes()


def num_resumes(out):
    """How often the run was taken up again."""
    return (Path(out) / "events.jsonl").read_text().count('"event":"resume"')


def trained(out):
    """The answers of each update, in order."""
    return [
        [(prompt, sample) for prompt, sample, *_ in row["trained"]]
        for row in events(out)
        if row["event"] == "update"
    ]


def metrics(out):
    """The numbers of each update that do not depend on time."""
    timed = ("seconds", "goodput", "throughput", "per_second", "bubble", "idle_share")
    return [
        {k: v for k, v in row.items() if not any(word in k for word in timed)}
        for row in read_metrics(Path(out) / "metrics.jsonl")
    ]


def checkpoints(out):
    """The whole checkpoints, the oldest first; each is read to its last byte."""
    found = sorted(
        path
        for path in (Path(out) / "checkpoints").glob("update-*")
        if path.suffix not in (".partial", ".replaced", ".abandoned")
    )
    for path in found:
        verify(path)
    return found


class Child:
    """A command in a process of its own."""

    def __init__(self, words, *, folder, log, file_bytes):
        self._log = log
        self._process = Forked(
            command,
            *words,
            folder=folder,
            out=log.with_suffix(".out"),
            err=log.with_suffix(".err"),
            file_bytes=file_bytes,
        )
        self.pid = self._process.pid

    @property
    def out(self):
        """What it has said on standard output."""
        return self._log.with_suffix(".out").read_text()

    @property
    def err(self):
        """What it has said on standard error."""
        return self._log.with_suffix(".err").read_text()

    def signal(self, number):
        """Send a signal, if it still runs."""
        if not self.is_over:
            os.kill(self.pid, number)

    @property
    def is_over(self):
        """Whether it has ended."""
        return self._process.poll() is not None

    def wait(self):
        """Its exit code; that of a process killed by a signal is negative."""
        return self._process.wait(PATIENCE_SECONDS)

    def until(self, happens):
        """Wait until something happens; whether it did while the process ran."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not happens():
            if self.is_over or time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True


class Nursery:
    """Starts commands in a folder, one at a time; a child that still runs ends with it."""

    def __init__(self, folder):
        self._folder = folder
        self._count = 0
        self._child = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._child is not None and not self._child.is_over:
            self._child.signal(signal.SIGKILL)
            self._child.wait()

    def start(self, words, *, file_bytes=None):
        """Start a command in the nursery's folder; no file of it may grow beyond `file_bytes`."""
        self._count += 1
        log = self._folder / f"child-{self._count}"
        for suffix in (".out", ".err"):
            log.with_suffix(suffix).write_bytes(b"")
        self._child = Child(words, folder=self._folder, log=log, file_bytes=file_bytes)
        return self._child

    def run(self, words, **limits):
        """Run a command to its end, which must be a good one; gives the child."""
        child = self.start(words, **limits)
        code = child.wait()
        assert code == 0, f"code {code}: {child.err}"
        return child
