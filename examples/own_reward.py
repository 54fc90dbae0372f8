"""Test your own reward before a run, with `python examples/own_reward.py`.

The function is plain Python. Worker processes import it from this file and run it with limits.

Needs: a CPU; pip install 'sortedrl[native]'. Takes: a few seconds.
Gives: the reward of three responses, one of which hangs and is stopped.
"""

from sortedrl.config.data import RewardSettings
from sortedrl.rewards.functions import source_of
from sortedrl.rewards.pool.pool import RewardPool
from sortedrl.types import Prompt


def brief_and_right(prompt: Prompt, response: str) -> dict[str, float]:
    """Named parts: the reward is their sum."""
    if "for ever" in response:
        while True:
            pass
    is_right = str(prompt.fields["answer"]) in response
    return {"answer": float(is_right), "length": -len(response) / 1000}


if __name__ == "__main__":
    question = Prompt(id=0, fields={"prompt": "What is 6 x 7?", "answer": 42})
    responses = ["It is 42.", "I think it is 41.", "I could go on for ever."]
    settings = RewardSettings(workers=2, time_limit_seconds=1, failure_reward=-1)
    with RewardPool(source_of(brief_and_right), settings) as pool:
        tickets = [pool.submit(question, response) for response in responses]
        for response, outcome in zip(responses, pool.wait(tickets), strict=True):
            assert outcome.score is not None
            print(f"{outcome.score.reward:6.3f}  {outcome.failure or 'scored':8}  {response}")
