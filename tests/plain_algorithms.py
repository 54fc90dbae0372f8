"""The formulas of docs/explanation/algorithms.md by hand: loops over floats, token by token.

Written from the formulas and not from the package, which it shares no code with. Answers are
lists; what belongs to tokens is a list of lists, one per answer.
"""

import math

FLOOR = 1e-6
FARTHEST = 20.0


def mean(values):
    return math.fsum(values) / len(values)


def deviation(values):
    """Sample standard deviation; 0 for a single value."""
    if len(values) == 1:
        return 0.0
    middle = mean(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1))


def exponential(number):
    """exp, with infinity where a float ends."""
    return math.exp(number) if number < 709 else math.inf


def bounded_ratio(numerator, denominator):
    return math.exp(min(max(numerator - denominator, -FARTHEST), FARTHEST))


def shaped(reward, length, *, max_tokens, overlong_tokens, penalty):
    start = max_tokens - overlong_tokens
    if length <= start:
        return reward
    if length >= max_tokens:
        return reward - penalty
    return reward - penalty * (length - start) / overlong_tokens


def siblings(prompts, number):
    """The places of all answers to the prompt of one of them."""
    return [n for n, prompt in enumerate(prompts) if prompt == prompts[number]]


def whitened(tokens):
    """All tokens of some answers, less their mean, over their deviation."""
    flat = [value for answer in tokens for value in answer]
    if not flat or min(flat) == max(flat):
        return [[0.0] * len(answer) for answer in tokens]
    middle, spread = mean(flat), deviation(flat)
    return [[(value - middle) / (spread + FLOOR) for value in answer] for answer in tokens]


def group_advantage(algorithm, rewards, prompts, number):
    """The advantage of one answer among its siblings."""
    name = algorithm.name
    group = [rewards[n] for n in siblings(prompts, number)]
    own = rewards[number]
    if min(group) == max(group):
        return 0.0
    if name == "rloo":
        others = [rewards[n] for n in siblings(prompts, number) if n != number]
        return own - mean(others)
    centred = own - mean(group)
    scale = algorithm.scale_rewards
    if scale is None:
        scale = "none" if name in ("dr_grpo", "reinforce_pp_baseline") else "group"
    if scale == "none":
        return centred
    return centred / (deviation(group if scale == "group" else rewards) + FLOOR)


def returns_to_go(rewards):
    return [math.fsum(rewards[place:]) for place in range(len(rewards))]


def generalised(rewards, values, *, discount, trust, last):
    """Advantages of one answer, from its last token to its first; `last` is the value after it."""
    advantages, later, next_value = [], 0.0, last
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        later = reward + discount * next_value - value + discount * trust * later
        advantages.insert(0, later)
        next_value = value
    return advantages


def advantages(algorithm, *, max_tokens, rewards, prompts, kl, values, last=None):
    """Advantages, and returns for ppo, of each token of each answer."""
    if algorithm.overlong_tokens is not None:
        rewards = [
            shaped(
                reward,
                len(own),
                max_tokens=max_tokens,
                overlong_tokens=algorithm.overlong_tokens,
                penalty=algorithm.overlong_penalty,
            )
            for reward, own in zip(rewards, kl, strict=True)
        ]
    weight = algorithm.kl_coef if algorithm.effective_kl_place == "reward" else 0.0
    tokens = [[-weight * k for k in own] for own in kl]
    for reward, own in zip(rewards, tokens, strict=True):
        own[-1] += reward
    if algorithm.name == "reinforce_pp":
        return whitened([returns_to_go(own) for own in tokens]), None
    if algorithm.name == "ppo":
        raw = [
            generalised(
                own, value, discount=algorithm.discount, trust=algorithm.gae_lambda, last=after
            )
            for own, value, after in zip(tokens, values, last or [0.0] * len(tokens), strict=True)
        ]
        returns = [
            [a + v for a, v in zip(own, value, strict=True)]
            for own, value in zip(raw, values, strict=True)
        ]
        return whitened(raw), returns
    totals = [math.fsum(own) for own in tokens]
    scores = [group_advantage(algorithm, totals, prompts, n) for n in range(len(totals))]
    spread = [[score] * len(own) for score, own in zip(scores, tokens, strict=True)]
    if algorithm.name == "reinforce_pp_baseline":
        compared = [n for n in range(len(totals)) if len(siblings(prompts, n)) > 1]
        for n, own in zip(compared, whitened([spread[n] for n in compared]), strict=True):
            spread[n] = own
    return spread, None


def correction(kind, behaviour, proximal, *, least, most, mask="none", lowest=0.0, highest=0.0):
    """Weights of the tokens of one answer, and whether each is held back."""
    ratios = levels(behaviour, proximal, "sequence" if kind.startswith("sequence") else "token")
    masking = levels(behaviour, proximal, "token" if mask == "none" else mask)
    weights = []
    for ratio, judged in zip(ratios, masking, strict=True):
        if mask != "none" and not lowest <= judged <= highest:
            weights.append((0.0, True))
        elif kind == "none":
            weights.append((1.0, False))
        elif kind.endswith("tis"):
            weights.append((max(min(ratio, most), least), not least <= ratio <= most))
        elif least <= ratio <= most:
            weights.append((ratio, False))
        else:
            weights.append((0.0, True))
    return [weight for weight, _ in weights], [held for _, held in weights]


def levels(behaviour, proximal, level):
    """For each token of one answer its ratio, that of the answer, or the geometric mean there."""
    logs = [p - b for p, b in zip(proximal, behaviour, strict=True)]
    if level == "token":
        return [exponential(log) for log in logs]
    whole = math.fsum(proximal) - math.fsum(behaviour)
    return [exponential(whole if level == "sequence" else whole / len(logs))] * len(logs)


def step_scale(level, answers, *, most):
    """The root of the effective share of truncated weights; answers are pairs of lists."""
    weights = []
    for behaviour, proximal in answers:
        own = levels(behaviour, proximal, level)
        weights += own if level == "token" else own[:1]
    return math.sqrt(effective_share([max(min(w, most), math.exp(-FARTHEST)) for w in weights]))


def policy_loss(current, proximal, advantage, *, low, high, dual):
    """The loss of one token by the published minimum of two products."""
    ratio = bounded_ratio(current, proximal)
    clipped = min(max(ratio, 1 - low), 1 + high)
    gain = min(ratio * advantage, clipped * advantage)
    if dual is not None and advantage < 0:
        gain = max(gain, dual * advantage)
    return -gain


def policy_slope(current, proximal, advantage, *, low, high, dual):
    """The derivative of that loss by the current log-probability."""
    ratio = bounded_ratio(current, proximal)
    stopped = (
        (advantage > 0 and ratio > 1 + high)
        or (advantage < 0 and ratio < 1 - low)
        or (advantage < 0 and dual is not None and ratio > dual)
        or abs(current - proximal) > FARTHEST
    )
    return 0.0 if stopped else -advantage * ratio


def is_stopped(ratio, advantage, *, low, high, dual):
    """Whether the clip has stopped the gradient of a ratio."""
    return (
        (advantage > 0 and ratio > 1 + high)
        or (advantage < 0 and ratio < 1 - low)
        or (advantage < 0 and dual is not None and ratio > dual)
    )


def sequence_ratio(current, anchor):
    """The geometric mean of the ratios of an answer's tokens."""
    product = mean([c - a for c, a in zip(current, anchor, strict=True)])
    return bounded_ratio(product, 0.0)


def clipped_mean_ratio(current, anchor, advantages, *, low, high):
    """The geometric mean of an answer's ratios, each clipped, and which are not."""
    product, is_free = 1.0, []
    for c, a, advantage in zip(current, anchor, advantages, strict=True):
        ratio = math.exp(c - a)
        is_free.append(not is_stopped(ratio, advantage, low=low, high=high, dual=None))
        product *= ratio if is_free[-1] else (1 + high if advantage > 0 else 1 - low)
    return product ** (1 / len(current)), is_free


def answer_losses(kind, current, anchor, advantages, *, low, high, dual):
    """For each token of one answer its loss, and the slopes of that by each log-probability."""
    size = len(current)
    whole = sequence_ratio(current, anchor)
    mixed, is_free = clipped_mean_ratio(current, anchor, advantages, low=low, high=high)
    losses, slopes = [], []
    for place, advantage in enumerate(advantages):
        ratio = bounded_ratio(current[place], anchor[place])
        only = [float(place == other) for other in range(size)]
        if kind in ("gspo", "gspo_token"):
            loss = policy_loss(math.log(whole), 0.0, advantage, low=low, high=high, dual=dual)
            is_over = is_stopped(whole, advantage, low=low, high=high, dual=dual)
            slope = 0.0 if is_over else -advantage * whole
            way = only if kind == "gspo_token" else [1 / size] * size
        elif kind == "cispo":
            slope = -advantage * min(max(ratio, 1 - low), 1 + high)
            loss, way = slope * current[place], only
        elif kind == "sapo":
            heat = 1.0 if advantage > 0 else 1.05
            gate = 1 / (1 + math.exp(-heat * (ratio - 1)))
            loss = -advantage * gate * 4 / heat
            slope, way = -advantage * 4 * gate * (1 - gate) * ratio, only
        else:
            assert kind == "gmpo"
            loss = slope = -advantage * mixed
            way = [free / size for free in is_free]
        losses.append(loss)
        slopes.append([slope * share for share in way])
    return losses, slopes


def kl_estimate(policy, reference, estimator):
    difference = policy - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference * difference
    bounded = min(max(difference, -FARTHEST), FARTHEST)
    return math.exp(-bounded) - 1 + bounded


def kl_slope(policy, reference, estimator):
    difference = policy - reference
    if estimator == "k1":
        return 1.0
    if estimator == "k2":
        return difference
    return 0.0 if abs(difference) > FARTHEST else 1 - math.exp(-difference)


def value_loss(value, old, target, *, clip):
    plain = 0.5 * (value - target) ** 2
    if clip is None:
        return plain
    near = min(max(value, old - clip), old + clip)
    return max(plain, 0.5 * (near - target) ** 2)


def joined(aggregation, losses, *, max_tokens):
    """The loss of a step from the losses of its tokens."""
    if aggregation == "token_mean":
        return mean([value for own in losses for value in own])
    if aggregation == "sequence_mean":
        return mean([mean(own) for own in losses])
    return math.fsum(value for own in losses for value in own) / (len(losses) * max_tokens)


def effective_share(weights):
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))


def quantile(values, percent):
    """The least value that at least so many percent of the values do not exceed."""
    for value in sorted(values):
        if 100 * sum(v <= value for v in values) >= percent * len(values):
            return value
    raise AssertionError("all values do not exceed the largest")
