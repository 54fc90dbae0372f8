"""SortedRL's scheduler with your own engine and trainer.

    python examples/own_loop.py

The engine is `transformers.generate`, ten tokens at a time; the trainer is plain REINFORCE. The
model learns to generate lowercase letters.

Needs: a CPU; pip install 'sortedrl[native]'. Takes: less than a minute.
Gives: a line for each update; the reward more than doubles.
"""

import torch

import sortedrl
from sortedrl.models.tiny import TinySettings, tiny_model, tiny_tokenizer

torch.manual_seed(0)
torch.set_num_threads(1)
tokenizer, model = tiny_tokenizer(), tiny_model(TinySettings(hidden=64, layers=1, context=128))
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
DIGITS, LIMIT = list(range(48, 58)), 40  # an answer ends with a digit, or after 40 tokens


def write(trajectory, version):  # your engine: one trajectory, a few tokens further
    known = torch.tensor([[*trajectory.prompt.tokens, *trajectory.tokens]])
    sampling = {"do_sample": True, "top_k": 0, "eos_token_id": DIGITS, "pad_token_id": 0}
    out = model.generate(
        known, max_new_tokens=10, output_logits=True, return_dict_in_generate=True, **sampling
    )
    tokens = out.sequences[0, known.shape[1] :].tolist()
    logprobs = torch.cat(out.logits).log_softmax(-1)[range(len(tokens)), tokens]
    written = trajectory.extended(tokens, logprobs.tolist(), version=version)
    if tokens[-1] in DIGITS or written.num_tokens >= LIMIT:
        return written.finished("stop" if tokens[-1] in DIGITS else "length")
    return written


def train(trajectories):  # your trainer: gives the mean reward
    texts = [tokenizer.decode(t.tokens) for t in trajectories]
    rewards = torch.tensor([sum(map(str.islower, text)) / max(1, len(text)) for text in texts])
    optimiser.zero_grad()
    for t, advantage in zip(trajectories, rewards - rewards.mean(), strict=True):
        logits = model(torch.tensor([[*t.prompt.tokens, *t.tokens]])).logits
        logprobs = logits[0, -t.num_tokens - 1 : -1].log_softmax(-1)[range(t.num_tokens), t.tokens]
        (-advantage * logprobs.mean()).backward()
    optimiser.step()
    return rewards.mean()


prompts = [{"tokens": tokenizer.encode(f"{number}:")} for number in range(160)]
schedule = sortedrl.Schedule(group_prompts=32, update_batch=8)
scheduler = sortedrl.Scheduler(prompts, slots=8, schedule=schedule)
while not scheduler.done:
    running = []
    while not scheduler.should_harvest:
        running = [write(t, scheduler.version) for t in [*running, *scheduler.to_start()]]
        for trajectory in [t for t in running if t.finish_reason]:
            running.remove(trajectory)
            scheduler.finished(trajectory)
    scheduler.interrupted(running)
    while batch := scheduler.batch():
        reward = train(batch.trajectories)
        scheduler.weights_changed()
        lengths = [t.num_tokens for t in batch.trajectories]
        print(f"update {scheduler.version:3}  reward {reward:.2f}  lengths {lengths}")
