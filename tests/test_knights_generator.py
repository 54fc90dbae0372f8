from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl.data.knights_puzzle import (
    Claim,
    Compound,
    Puzzle,
    canonical_key,
    holds,
    solutions,
)
from sortedrl.data.knights_rows import FORMS, StatementShape, generate
from sortedrl.errors import ConfigError
from test_knights_canonical import brute_force_key, split_of
from test_knights_puzzle import depth
from test_knights_solver import brute_force


def shapes():
    """Shapes with enough puzzles to draw a few; without `and` and `or` width does not matter."""
    forms = st.lists(st.sampled_from(FORMS), min_size=3, unique=True).map(tuple)
    return st.builds(StatementShape, forms=forms, width=st.integers(2, 4), depth=st.integers(1, 3))


def form_of(statement):
    return "claim" if isinstance(statement, Claim) else statement.kind


def widths(statement):
    if isinstance(statement, Claim):
        return
    if statement.kind in ("and", "or"):
        yield len(statement.parts)
    for part in statement.parts:
        yield from widths(part)


def inner_forms(statement):
    if isinstance(statement, Compound):
        for part in statement.parts:
            yield form_of(part)
            yield from inner_forms(part)


@settings(max_examples=60)
@given(st.integers(3, 8), shapes(), st.integers(0, 10**9), st.sampled_from(("train", "test")))
def test_every_puzzle_has_one_solution_the_shape_asked_for_and_its_split(
    people, shape, seed, split
):
    puzzles = generate(people, 4, shape=shape, seed=seed, split=split, test_share=0.4)
    assert len({canonical_key(puzzle) for puzzle in puzzles}) == len(puzzles) == 4
    for puzzle in puzzles:
        assert puzzle.people == people
        assert len(brute_force(puzzle.text)) == 1
        assert split_of(puzzle, 0.4) == split
        for statement in puzzle.statements:
            assert form_of(statement) in shape.forms
            assert set(inner_forms(statement)) <= {*shape.forms, "claim"}
            assert depth(statement) <= shape.depth
            assert all(2 <= width <= shape.width for width in widths(statement))


@settings(max_examples=60)
@given(st.integers(3, 6), shapes(), st.integers(0, 10**9))
def test_no_statement_is_empty_talk(people, shape, seed):
    every = list(product((True, False), repeat=people))
    for puzzle in generate(people, 3, shape=shape, seed=seed):
        for speaker, statement in enumerate(puzzle.statements):
            values = {holds(statement, roles) for roles in every}
            fits = {holds(statement, roles) == roles[speaker] for roles in every}
            assert values == fits == {True, False}


@settings(max_examples=30)
@given(st.integers(3, 7), shapes(), st.integers(0, 10**9), st.integers(0, 5))
def test_a_shorter_call_gives_the_first_puzzles_of_a_longer_one(people, shape, seed, count):
    longer = generate(people, 6, shape=shape, seed=seed)
    assert generate(people, count, shape=shape, seed=seed) == longer[:count]


def test_puzzles_of_the_splits_never_meet_whatever_the_seeds():
    keys = {
        split: {
            canonical_key(puzzle)
            for seed in range(6)
            for puzzle in generate(3, 60, seed=seed, split=split, test_share=0.3)
        }
        for split in ("train", "test")
    }
    assert not keys["train"] & keys["test"]
    assert min(len(found) for found in keys.values()) > 200


def test_another_seed_gives_other_puzzles():
    one, other = (generate(5, 50, seed=seed) for seed in (1, 2))
    assert not {canonical_key(p) for p in one} & {canonical_key(p) for p in other}


def test_drawn_puzzles_stay_the_same_from_release_to_release():
    (puzzle,) = generate(3, 1, seed=7)
    said = ("('<=>', ('lying', 2), ('telling-truth', 0))", "('not', ('telling-truth', 0))")
    assert puzzle.text == f"({', '.join(said)}, ('lying', 1))"


@pytest.mark.parametrize("people", [3, 5, 8])
def test_roles_and_forms_are_about_even(people):
    puzzles = generate(people, 300, seed=3)
    roles = [role for puzzle in puzzles for role in solutions(puzzle)[0]]
    assert 0.45 < sum(roles) / len(roles) < 0.58
    forms = Counter(form_of(s) for puzzle in puzzles for s in puzzle.statements)
    assert set(forms) == set(FORMS)
    assert all(0.12 < count / len(roles) < 0.23 for count in forms.values())


def says_something(puzzle):
    every = list(product((True, False), repeat=puzzle.people))
    for speaker, said in enumerate(puzzle.statements):
        if len({holds(said, roles) == roles[speaker] for roles in every}) == 1:
            return False
    return True


def test_an_exhausted_space_is_refused_and_every_puzzle_of_it_was_found():
    forms = ("claim", "and", "->")
    claims = [[Claim(person, role) for role in (True, False)] for person in range(2)]
    said = [*claims[0], *claims[1]]
    for one, other in (claims, claims[::-1]):
        said += [Compound(kind, pair) for kind in ("and", "->") for pair in product(one, other)]
    every = [Puzzle(pair) for pair in product(said, said)]
    right = [p for p in every if len(brute_force(p.text)) == 1 and says_something(p)]
    keys = {brute_force_key(puzzle): puzzle for puzzle in right}
    train = sum(split_of(puzzle, 0.1) == "train" for puzzle in keys.values())
    with pytest.raises(ConfigError, match=f"2 people were requested, but only {train} were found"):
        generate(2, 1000, shape=StatementShape(forms=forms))
    assert len(generate(2, train, shape=StatementShape(forms=forms))) == train


def test_two_people_who_only_claim_have_no_puzzle_at_all():
    with pytest.raises(ConfigError, match="only 0 were found in"):
        generate(2, 1, shape=StatementShape(forms=("claim",)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"forms": ()}, "must name at least one of claim, not"),
        ({"forms": ("andd",)}, "unknown form 'andd'; did you mean 'and'"),
        ({"width": 1}, r"width must lie in 2\.\.8, got 1"),
        ({"width": 9}, r"width must lie in 2\.\.8, got 9"),
        ({"depth": 0}, r"depth must lie in 1\.\.4, got 0"),
        ({"depth": 5}, r"depth must lie in 1\.\.4, got 5"),
    ],
)
def test_impossible_shapes_are_refused(change, reason):
    with pytest.raises(ConfigError, match=reason):
        StatementShape(**change)


@pytest.mark.parametrize("people", [1, 9])
def test_too_few_and_too_many_people_are_refused(people):
    with pytest.raises(ConfigError, match=r"people must lie in 2\.\.8"):
        generate(people, 1)
