"""Small worlds for the native engine: tiny random models, and the plain arithmetic it must match.

Axes: T positions of a text, V vocabulary.
"""

from collections import defaultdict
from dataclasses import replace
from functools import cache
from random import Random

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sortedrl.engines.native import NativeEngine
from sortedrl.types import Prompt, Trajectory

# Products this small are slower on two threads, many times so if others want the cores too.
torch.set_num_threads(1)

VOCABULARY = 128
CONTEXT = 256
_SLIDING = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 8,
}
_FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, _SLIDING | {"tie_word_embeddings": False}),
}
ARCHITECTURES = tuple(_FAMILIES)


def tiny_model(architecture="llama", *, seed=0, std=0.2, **changes):
    """A random model with opinions: at the usual initialisation all tokens are alike."""
    model_class, config_class, special = _FAMILIES[architecture]
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    model = model_class(config_class(**(sizes | special | changes))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, std, generator=generator)
            if parameter.dim() == 1 and architecture != "gemma3":
                parameter.add_(1)
    return model


shared_model = cache(tiny_model)
"""The same model for all tests that leave it as it is; the engine must."""


def trained_a_little(model, *, learning_rate, steps=1, seed=0):
    """A real gradient step on random text, in place."""
    generator = torch.Generator().manual_seed(seed)
    texts = torch.randint(0, VOCABULARY, (2, 16), generator=generator).to(model.device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    for _ in range(steps):
        optimiser.zero_grad()
        model(texts, labels=texts).loss.backward()
        optimiser.step()
    return model


def fresh(tokens, *, prompt=0, sample=0, seed=None, attempt=0):
    """An answer to be written, with noise of its own."""
    return Trajectory(
        prompt=Prompt(id=prompt, tokens=tuple(tokens)),
        sample_index=sample,
        group=0,
        seed=1000 * prompt + sample if seed is None else seed,
        attempt=attempt,
    )


def random_texts(lengths, *, seed=0):
    """Prompts of these lengths; every second one begins as the one before it."""
    random = Random(seed)
    texts = []
    for number, length in enumerate(lengths):
        start = texts[-1] if number % 2 else []
        start = start[: length - 1]
        texts.append(start + [random.randrange(VOCABULARY) for _ in range(length - len(start))])
    return texts


def fresh_all(lengths, *, samples=1, seed=0):
    """Answers to be written to random prompts of these lengths."""
    return [
        fresh(tokens, prompt=number, sample=sample)
        for number, tokens in enumerate(random_texts(lengths, seed=seed))
        for sample in range(samples)
    ]


def blocks_bytes(model, blocks, *, block_tokens):
    """`cache_bytes` for so many blocks that requests may use."""
    token_bytes = NativeEngine(model, slots=1).cache.token_bytes
    return (blocks + 1) * block_tokens * token_bytes


def finish(engine, keys):
    """Step until these are complete, each exactly once."""
    done = {}
    missing = set(keys)
    while missing:
        step = engine.step()
        assert step.finished or step.decoded_tokens, "an engine with work moves"
        for trajectory in step.finished:
            missing.remove(trajectory.key)
            done[trajectory.key] = trajectory
    assert not engine.interrupt()
    return done


def roll_out(engine, trajectories, *, tolerance=None):
    """The complete answers, in order."""
    engine.submit(trajectories, tolerance=tolerance)
    done = finish(engine, [t.key for t in trajectories])
    return [done[t.key] for t in trajectories]


def answer(trajectory):
    """What must not depend on the way an answer was written, to the last bit."""
    return trajectory.tokens, trajectory.logprobs, trajectory.finish_reason


def after_steps(engine, trajectories, steps):
    """Unfinished and finished answers, as they stand after so many steps."""
    engine.submit(trajectories, tolerance=None)
    finished = [t for _ in range(steps) for t in engine.step().finished]
    by_key = {t.key: t for t in [*finished, *engine.interrupt()]}
    return [replace(by_key[t.key], finish_reason=None) for t in trajectories]


@torch.no_grad()
def plain_logits(model, trajectory):
    """The logits behind each token of an answer, by one forward pass of the model on its own."""
    prompt, tokens = list(trajectory.prompt.tokens), trajectory.tokens
    logits_TV = model(torch.tensor([prompt + tokens])).logits[0]
    return logits_TV[len(prompt) - 1 : -1].float()


def plain_logprobs(model, trajectory, *, temperature=1.0):
    """The log-probabilities of an answer's tokens, by one forward pass of the model on its own."""
    logprobs_TV = (plain_logits(model, trajectory) / temperature).log_softmax(-1)
    return logprobs_TV.gather(-1, torch.tensor(trajectory.tokens)[:, None])[:, 0].tolist()


def chi_square_p(counts, probabilities):
    """How likely counts are at least this far from what the probabilities say.

    Rare outcomes are counted together until 10 of them are expected.
    """
    expected = probabilities.double() * counts.sum()
    order = expected.argsort(descending=True)
    bins = [(counts[i].double(), expected[i]) for i in order if expected[i] >= 10]
    rest = [(counts[i].double(), expected[i]) for i in order if 0 < expected[i] < 10]
    if rest:
        rare = tuple(sum(column) for column in zip(*rest, strict=True))
        if rare[1] >= 10 or not bins:
            bins.append(rare)
        else:
            bins[-1] = (bins[-1][0] + rare[0], bins[-1][1] + rare[1])
    statistic = sum((count - mean) ** 2 / mean for count, mean in bins)
    freedom = torch.tensor(len(bins) - 1.0, dtype=torch.double)
    return torch.special.gammaincc(freedom / 2, statistic / 2).item()


class LaggingRunner:
    """The CPU runner, read `lag` passes late, as a GPU is: it knows tokens the host does not."""

    def __init__(self, runner, *, lag):
        self.lag = lag
        self._runner = runner
        self._unread = defaultdict(list)

    def launch(self, plan):
        requests = {span.request for span in plan.spans}
        for request in requests:
            request.tokens += self._unread[request]
        choice = self._runner.launch(plan)
        for request in requests:
            del request.tokens[len(request.tokens) - len(self._unread[request]) :]
        row = 0
        for span in plan.sampled:
            if span.is_speculative:
                self._unread[span.request].append(int(choice.tokens_Q[row]))
            row += span.num_rows
        return plan, choice

    def collect(self, ticket):
        plan, choice = ticket
        for span in plan.sampled:
            if span.is_speculative:
                del self._unread[span.request][0]
                if not self._unread[span.request]:
                    del self._unread[span.request]
        return self._runner.collect(choice)

    def weights_changed(self):
        self._runner.weights_changed()


def lagging(engine, *, lag):
    """The engine with its device running ahead of it."""
    engine._runner = LaggingRunner(engine._runner, lag=lag)
    return engine
