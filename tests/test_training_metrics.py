"""The logged numbers of an update, against loops over floats."""

import math
import time
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import plain_algorithms as plain
from sortedrl.config.algorithm import Correction
from sortedrl.training.batch import Answers
from sortedrl.training.losses import TokenLosses
from sortedrl.training.update_metrics import UpdateRecord, update_metrics

KINDS = ("none", "token_tis", "sequence_tis", "token_mis", "sequence_mis")
NAMES = ["stale_0", "stale_1", "stale_2", "stale_3", "stale_4_up"]


def tokens_of(masks):
    low, high, dual = (torch.tensor(mask) for mask in masks)
    return TokenLosses(
        loss_T=torch.zeros(len(low)),
        is_clipped_low_T=low,
        is_clipped_high_T=high,
        is_dual_clipped_T=dual,
    )


def random_record(seed, *, lengths, kind="token_tis", ratio="proximal", oldest=6, extremes=True):
    random, size = Random(seed), sum(lengths)

    def column(low, high):
        return torch.tensor([random.uniform(low, high) for _ in range(size)], dtype=torch.float64)

    behaviour_T = column(-3, 0)
    if extremes:
        behaviour_T[random.randrange(size)] = -900.0
    least = 0.4 if kind.endswith("mis") else 0.0
    return UpdateRecord(
        answers=Answers(
            lengths_N=torch.tensor(lengths),
            rewards_N=torch.tensor([random.choice((0.0, 1.0)) for _ in lengths]).double(),
            prompts_N=torch.arange(len(lengths)),
            is_truncated_N=torch.tensor([random.random() < 0.3 for _ in lengths]),
            behaviour_T=behaviour_T,
            staleness_T=torch.tensor([random.randint(0, oldest) for _ in range(size)]),
        ),
        advantages_T=column(-2, 2),
        proximal_T=column(-3, 0),
        current_T=column(-3, 0),
        correction=Correction(kind=kind, min_ratio=least, ratio=ratio),
        tokens=tokens_of([[random.random() < 0.3 for _ in range(size)] for _ in range(3)]),
        kl_T=column(0, 1),
        entropy_T=column(0, 3),
    )


def population_deviation(values):
    middle = plain.mean(values)
    return math.sqrt(plain.mean([(value - middle) ** 2 for value in values]))


def held_back(record):
    """Whether each token is held back, answer by answer."""
    bounds = {"least": record.correction.min_ratio, "most": record.correction.max_ratio}
    lengths = record.answers.lengths_N.tolist()
    behaviour = record.answers.behaviour_T.split(lengths)
    proximal = record.proximal_T.split(lengths)
    return [
        held
        for own, other in zip(behaviour, proximal, strict=True)
        for held in plain.correction(
            record.correction.kind, own.tolist(), other.tolist(), **bounds
        )[1]
    ]


def expected(record):
    """All numbers once more."""
    answers, tokens = record.answers, record.tokens
    behaviour, proximal = answers.behaviour_T.tolist(), record.proximal_T.tolist()
    anchor = proximal if record.correction.ratio == "proximal" else behaviour
    ratios = list(map(plain.bounded_ratio, proximal, behaviour))
    moves = list(map(plain.bounded_ratio, record.current_T.tolist(), anchor))
    numbers = {
        "reward/mean": plain.mean(answers.rewards_N.tolist()),
        "reward/std": population_deviation(answers.rewards_N.tolist()),
        "length/mean": plain.mean(answers.lengths_N.tolist()),
        "length/truncated": plain.mean(answers.is_truncated_N.tolist()),
        "advantage/std": population_deviation(record.advantages_T.tolist()),
        "correction/ess": plain.effective_share(ratios),
        "correction/held_back": plain.mean(held_back(record)),
        "policy/clipped_low": plain.mean(tokens.is_clipped_low_T.tolist()),
        "policy/clipped_high": plain.mean(tokens.is_clipped_high_T.tolist()),
        "policy/clipped_dual": plain.mean(tokens.is_dual_clipped_T.tolist()),
        "kl/mean": plain.mean(record.kl_T.tolist()),
        "entropy/mean": plain.mean(record.entropy_T.tolist()),
    }
    for name, values in (("correction", ratios), ("policy", moves)):
        for percent in (1, 50, 99):
            numbers[f"{name}/ratio_p{percent}"] = plain.quantile(values, percent)
        numbers[f"{name}/ratio_max"] = max(values)
    ages = [min(age, 4) for age in answers.staleness_T.tolist()]
    for age, name in enumerate(NAMES):
        own = [ratio for ratio, of in zip(ratios, ages, strict=True) if of == age]
        numbers[f"{name}/share"] = len(own) / len(ratios)
        if own:
            numbers[f"{name}/ratio"] = plain.mean(own)
            numbers[f"{name}/ess"] = plain.effective_share(own)
    pairs = zip(behaviour, proximal, ages, strict=True)
    gaps = [abs(p - b) for b, p, age in pairs if age == 0]
    if gaps:
        numbers |= {"gap/max": max(gaps), "gap/mean": plain.mean(gaps)}
    return numbers


@settings(max_examples=80)
@given(
    st.integers(0, 2**32),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.sampled_from(KINDS),
    st.booleans(),
)
def test_all_numbers_are_those_of_the_plain_formulas(seed, lengths, kind, extremes):
    record = random_record(seed, lengths=lengths, kind=kind, extremes=extremes)
    ours, theirs = update_metrics(record), expected(record)
    assert ours.keys() == theirs.keys()
    assert all(type(value) is float for value in ours.values())
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)
    assert all(map(math.isfinite, ours.values()))


def test_the_clipped_ratio_is_taken_against_the_behaviour_policy_where_that_is_set():
    record = random_record(5, lengths=[7, 3], kind="none", ratio="behaviour", extremes=False)
    ours = update_metrics(record)
    assert ours == pytest.approx(expected(record), rel=1e-9)
    other = update_metrics(replace(record, correction=Correction(kind="none")))
    assert ours["policy/ratio_max"] != other["policy/ratio_max"]


def test_what_does_not_exist_has_no_entry():
    record = random_record(1, lengths=[4], oldest=0)
    stale = replace(record.answers, staleness_T=torch.full((4,), 9))
    ours = update_metrics(replace(record, answers=stale, kl_T=None, entropy_T=None))
    absent = {"gap/max", "gap/mean", "kl/mean", "entropy/mean", "stale_0/ess", "stale_0/ratio"}
    assert not absent & ours.keys()
    assert (ours["stale_0/share"], ours["stale_4_up/share"]) == (0.0, 1.0)


def test_a_fresh_update_shows_no_drift():
    record = random_record(2, lengths=[3, 5], oldest=0, extremes=False)
    same = record.answers.behaviour_T
    ours = update_metrics(replace(record, proximal_T=same, current_T=same))
    ones = ["correction/ess", "stale_0/ess", "stale_0/share", "stale_0/ratio", "policy/ratio_p1"]
    assert [ours[name] for name in ones] == pytest.approx([1.0] * 5)
    assert ours["correction/ratio_max"] == 1.0
    assert (ours["gap/max"], ours["correction/held_back"]) == (0.0, 0.0)


def test_the_gap_counts_fresh_tokens_only():
    record = random_record(3, lengths=[4], extremes=False)
    answers = replace(record.answers, staleness_T=torch.tensor([0, 0, 1, 2]))
    gaps = torch.tensor([0.01, -0.03, 5.0, -7.0])
    ours = update_metrics(replace(record, answers=answers, proximal_T=answers.behaviour_T + gaps))
    assert ours["gap/max"] == pytest.approx(0.03, rel=1e-6)
    assert ours["gap/mean"] == pytest.approx(0.02, rel=1e-6)


def test_a_million_tokens_take_a_moment():
    record = random_record(4, lengths=[1000], extremes=False)
    answers = record.answers
    many = replace(
        record,
        answers=replace(
            answers,
            lengths_N=torch.full((1000,), 1000),
            rewards_N=torch.zeros(1000),
            prompts_N=torch.arange(1000),
            behaviour_T=answers.behaviour_T.repeat(1000),
            staleness_T=answers.staleness_T.repeat(1000),
        ),
        advantages_T=record.advantages_T.repeat(1000),
        proximal_T=record.proximal_T.repeat(1000),
        current_T=record.current_T.repeat(1000),
        kl_T=None,
        entropy_T=None,
    )
    began = time.process_time()
    ours = update_metrics(many)
    assert time.process_time() - began < 20
    few = update_metrics(record)
    for name in ("correction/ess", "policy/ratio_p1", "correction/ratio_p99", "stale_1/ess"):
        assert ours[name] == pytest.approx(few[name], rel=1e-9)
