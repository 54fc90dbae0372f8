"""Generate answers with the native engine: python examples/generate.py MODEL "a prompt" ...

MODEL is a hub name, a folder or a .gguf file. Uses a GPU if there is one, otherwise the CPU.

Needs: pip install 'sortedrl[native]'. Takes: seconds after the model is loaded.
Gives: two answers to each prompt, with their log-probabilities.
"""

import sys

from sortedrl.engines.native import NativeEngine, Sampling

model, *prompts = sys.argv[1:]
engine = NativeEngine.from_pretrained(
    model, slots=32, max_tokens=128, sampling=Sampling(temperature=0.8, top_p=0.95)
)
for answer in engine.generate(prompts, samples_per_prompt=2, seed=0):
    print(f"\n> {prompts[answer.prompt.id]}\n{engine.text(answer)}")
    print(f"  {answer.num_tokens} tokens, {answer.finish_reason}, {sum(answer.logprobs):.1f} nats")
