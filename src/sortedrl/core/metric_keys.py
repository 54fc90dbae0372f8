"""Every key of metrics.jsonl and what it means: the reference page is made from this table.

A part in capitals stands for a name: `reward/PART` is `reward/format` where the reward has a part
called format. A number that does not exist has no entry in a row; one that is not finite is null.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

METRIC_KEYS: Mapping[str, Mapping[str, str]] = {
    "Where the run is": {
        "update": "update batches so far",
        "version": "how often the weights have changed",
        "total/seconds": "seconds since the run began, evaluations excluded",
        "total/samples": "answers trained on so far",
        "total/trained_tokens": "tokens trained on so far",
        "total/decoded_tokens": "tokens generated so far",
    },
    "Answers of the update": {
        "reward/mean": "mean reward, before overlong shaping",
        "reward/std": "standard deviation of the rewards (divided by n)",
        "reward/PART": "mean of a part that the reward names",
        "length/mean": "tokens per answer",
        "length/truncated": "share of the answers that reached the token limit",
        "advantage/std": "standard deviation of the advantages over tokens",
        "unusable_answers": "answers left out: reward or a log-probability not finite",
        "held": "answers held back by dynamic sampling; such a row has no numbers of an update",
    },
    "The update": {
        "loss": "mean loss of the optimiser steps",
        "grad_norm": "gradient norm before clipping, the largest of several steps",
        "learning_rate": "learning rate of the last step",
        "value_loss": "loss of the critic (ppo)",
        "skipped_steps": "steps skipped because loss or gradient was not finite",
        "loss_scale": "float16 only: factor on the loss in the backward pass",
        "fill": "how full the packed micro-batches were",
        "update_seconds": "time of the update alone",
        "entropy/mean": "entropy of the policy in nats, where it is computed",
        "kl/mean": "KL divergence from the reference, where there is one",
        "kl/reference_age": "updates since the reference was refreshed (reference_refresh)",
        "policy/ratio_p1": "quantile of the clipped ratio: 1 % of the tokens lie below",
        "policy/ratio_p50": "median of the clipped ratio",
        "policy/ratio_p99": "quantile of the clipped ratio: 99 % of the tokens lie below",
        "policy/ratio_max": "largest clipped ratio",
        "policy/clipped_low": "share of the tokens whose gradient stopped at the lower clip bound",
        "policy/clipped_high": "share of the tokens whose gradient stopped at the upper one",
        "policy/clipped_dual": "share of the tokens at the dual clip",
    },
    "Engine against trainer, and stale tokens": {
        "gap/mean": "mean absolute difference of log-probabilities between engine and trainer "
        "on fresh tokens, in nats",
        "gap/max": "the largest such difference; below 1e-4 in fp32 on a CPU",
        "correction/ess": "effective sample size of the importance weights, as a share of tokens",
        "correction/ratio_p1": "quantile of the importance ratio: 1 % of the tokens lie below",
        "correction/ratio_p50": "median importance ratio",
        "correction/ratio_p99": "quantile of the importance ratio: 99 % of the tokens lie below",
        "correction/ratio_max": "largest importance ratio",
        "correction/held_back": "share of the tokens whose weight is truncated or masked",
        "correction/masked": "share of the tokens that correction.mask masks; only with a mask",
        "correction/step_scale": "factor of scale_by_ess on the learning rate; only with it",
        "stale_AGE/share": "share of the tokens of this staleness: 0 to 3, 4_up",
        "stale_AGE/ratio": "their mean importance ratio",
        "stale_AGE/ess": "their effective sample size, as a share",
    },
    "Rollout since the update before": {
        "rollout/bubble": "idle share of the slots while answers were generated",
        "rollout/outside_bubble": "the part of it in which an environment was awaited",
        "rollout/idle_share": "idle share of the slots over all time, updates included",
        "rollout/goodput": "trained tokens per second of rollout",
        "rollout/throughput": "decoded tokens per second of rollout",
        "rollout/trained_per_second": "trained tokens per second, updates included",
        "rollout/mean_length": "tokens per answer trained on",
        "rollout/decoded_tokens": "tokens generated",
        "rollout/trained_tokens": "tokens trained on",
        "rollout/discarded_tokens": "tokens discarded: redrawn, too old, or not verified",
        "rollout/cached_tokens": "tokens neither trained nor discarded yet",
        "rollout/kept_tokens": "tokens reused from the cache at a resume",
        "rollout/prefilled_again_tokens": "tokens prefilled to resume answers",
        "rollout/mean_staleness": "mean staleness of the tokens trained on",
        "rollout/max_staleness": "largest staleness of a token trained on",
        "rollout/mean_trajectory_staleness": "mean staleness of the oldest token of an answer",
        "rollout/updates": "updates in this window",
        "rollout/trajectories": "answers trained on in this window",
        "rollout/rollout_seconds": "seconds of rollout",
        "rollout/seconds": "seconds in all",
    },
    "Clusters": {
        "hand_over/seconds": "seconds of the weight sync",
        "hand_over/bytes": "bytes of one copy of the weights",
        "hand_over/buckets": "buckets the weights were sent in",
        "hand_over/workers": "workers that received them",
        "hand_over/put_seconds": "seconds until the slowest bucket was on its way",
        "hand_over/fetch_seconds": "seconds until the slowest worker had them",
        "hand_over/load_seconds": "seconds until the slowest worker generated with them",
        "overlap/update_seconds": "cluster.overlap: how long the update took",
        "overlap/beside_seconds": "the part of it that overlapped the rollout",
        "overlap/waited_seconds": "the rest, which the run waited for",
    },
    "Evaluation": {
        "evaluation/score": "share of right answers, mean over the held-out tasks",
        "evaluation/TASK": "share of right answers of one task",
        "evaluation/length": "tokens per held-out answer",
        "evaluation/turns": "turns of the policy per held-out conversation",
        "evaluation/outside_seconds": "seconds that one waited for its environment",
    },
}
"""Section -> key -> meaning."""

_PATTERNS = [
    re.compile("".join(r".+" if part.isupper() else re.escape(part) for part in parts))
    for keys in METRIC_KEYS.values()
    for key in keys
    for parts in [re.split(r"(PART|TASK|AGE)", key)]
]


def is_described(key: str) -> bool:
    """Whether the table has this key of a row.

    >>> is_described("stale_4_up/share"), is_described("reward/format"), is_described("lost")
    (True, True, False)
    """
    return any(pattern.fullmatch(key) for pattern in _PATTERNS)
