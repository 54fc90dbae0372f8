import ast
import random
from itertools import combinations_with_replacement, permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.data.knights_puzzle import (
    Claim,
    Compound,
    Puzzle,
    canonical_key,
    parse_puzzle,
    split_of_key,
)
from sortedrl.errors import ConfigError
from test_knights_puzzle import puzzles


def split_of(puzzle, test_share):
    return split_of_key(canonical_key(puzzle), test_share)


def renamed(statement, places, shuffle):
    """The statement with other people, and unordered parts in another order."""
    if isinstance(statement, Claim):
        return Claim(places[statement.person], statement.is_knight)
    parts = [renamed(part, places, shuffle) for part in statement.parts]
    if statement.kind != "->":
        shuffle(parts)
    return Compound(statement.kind, tuple(parts))


def permuted(puzzle, seed):
    """The same puzzle with the people in another order."""
    generator = random.Random(seed)
    places = generator.sample(range(puzzle.people), puzzle.people)
    statements = [None] * puzzle.people
    for person, statement in enumerate(puzzle.statements):
        statements[places[person]] = renamed(statement, places, generator.shuffle)
    return Puzzle(tuple(statements))


def normal(said, places):
    word, *rest = said
    if word in ("telling-truth", "lying"):
        return f"{word} {places[rest[0]]}"
    parts = [normal(part, places) for part in rest]
    return f"{word} ({'; '.join(parts if word == '->' else sorted(parts))})"


def brute_force_key(puzzle):
    """The smallest text over every order of the people."""
    said = ast.literal_eval(puzzle.text)
    texts = []
    for places in permutations(range(len(said))):
        by_place = sorted(zip(places, said, strict=True), key=lambda pair: pair[0])
        texts.append([normal(statement, places) for _, statement in by_place])
    return repr(min(texts))


@given(puzzles(most=6), st.integers())
def test_renaming_people_leaves_the_key_alone(puzzle, seed):
    assert canonical_key(permuted(puzzle, seed)) == canonical_key(puzzle)


@given(puzzles(least=2, most=3, depth=1), puzzles(least=2, most=3, depth=1))
def test_keys_agree_exactly_if_some_renaming_makes_the_puzzles_equal(one, other):
    same_key = canonical_key(one) == canonical_key(other)
    assert same_key == (brute_force_key(one) == brute_force_key(other))


@given(puzzles(least=4, most=4, depth=2), st.data())
def test_a_changed_person_changes_the_key_as_brute_force_says(puzzle, data):
    """Puzzles that are nearly the same are the hard ones to tell apart."""
    speaker, subject = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    statements = list(puzzle.statements)
    statements[speaker] = Claim(subject, is_knight=True)
    other = permuted(Puzzle(tuple(statements)), data.draw(st.integers()))
    same_key = canonical_key(puzzle) == canonical_key(other)
    assert same_key == (brute_force_key(puzzle) == brute_force_key(other))


def every_puzzle(people, kinds):
    said = [Claim(person, role) for person in range(people) for role in (True, False)]
    joins = [Compound(kind, pair) for kind in kinds for pair in product(said, said)]
    return [Puzzle(each) for each in product([*said, *joins], repeat=people)]


@pytest.mark.parametrize(
    ("people", "kinds"), [(2, ("and", "->")), (3, ()), (4, ())], ids=["two", "three", "four"]
)
def test_keys_sort_small_puzzles_into_the_classes_of_brute_force(people, kinds):
    some = every_puzzle(people, kinds)
    some = random.Random(0).sample(some, min(len(some), 1500))
    pairs = {(canonical_key(puzzle), brute_force_key(puzzle)) for puzzle in some}
    assert len({key for key, _ in pairs}) == len({key for _, key in pairs}) == len(pairs)
    assert len(pairs) < len(some)


def both(kind, *people):
    return Compound(kind, tuple(Claim(person % 8, is_knight=True) for person in people))


SYMMETRIC = {
    "of oneself": [Claim(i, is_knight=True) for i in range(8)],
    "in a circle": [Claim((i + 1) % 8, is_knight=True) for i in range(8)],
    "in two circles": [Claim((i + 1) % 4 + 4 * (i // 4), is_knight=True) for i in range(8)],
    # Colours cannot tell these circles apart, and who is singled out first makes a difference.
    "in circles of three and five": [
        Claim((1, 2, 0, 4, 5, 6, 7, 3)[i], is_knight=True) for i in range(8)
    ],
    "in pairs": [Claim(i ^ 1, is_knight=True) for i in range(8)],
    "of both neighbours": [both("<=>", i - 1, i + 1) for i in range(8)],
    "along a cube": [both("and", i ^ 1, i ^ 2, i ^ 4) for i in range(8)],
    "of everyone": [both("or", *range(8)) for _ in range(8)],
    "of the others": [both("or", *(j for j in range(8) if j != i)) for i in range(8)],
    "of the first half": [both("or", *range(4)[:: (-1) ** i]) for i in range(8)],
}


@pytest.mark.parametrize("name", SYMMETRIC)
def test_symmetric_puzzles_of_eight_have_one_key_whatever_the_order(name):
    puzzle = Puzzle(tuple(SYMMETRIC[name]))
    assert {canonical_key(permuted(puzzle, seed)) for seed in range(5)} == {canonical_key(puzzle)}


def test_symmetric_puzzles_of_eight_have_different_keys():
    keys = {name: canonical_key(Puzzle(tuple(said))) for name, said in SYMMETRIC.items()}
    assert len(set(keys.values())) == len(keys)


def test_what_is_unordered_and_what_is_not():
    def key(said):
        return canonical_key(parse_puzzle(f"({said}, ('telling-truth', 0))"))

    one, other = "('lying', 0)", "('telling-truth', 1)"
    for kind in ("and", "or", "<=>"):
        assert key(f"('{kind}', {one}, {other})") == key(f"('{kind}', {other}, {one})")
    assert key(f"('->', {one}, {other})") != key(f"('->', {other}, {one})")
    assert key(f"('and', {one}, {other})") != key(f"('or', {one}, {other})")
    assert key("('lying', 1)") != key("('not', ('telling-truth', 1))")


@given(puzzles(most=4), st.integers(), st.floats(0.001, 0.999), st.floats(0.001, 0.999))
def test_the_split_follows_the_key_and_grows_with_the_share(puzzle, seed, one, other):
    smaller, larger = sorted((one, other))
    assert split_of(permuted(puzzle, seed), one) == split_of(puzzle, one)
    if split_of(puzzle, smaller) == "test":
        assert split_of(puzzle, larger) == "test"


def test_the_test_split_holds_about_its_share():
    claims = [Claim(person, role) for person in range(3) for role in (True, False)]
    joins = [Compound("->", pair) for pair in combinations_with_replacement(claims, 2)]
    every = [Puzzle(each) for each in product(joins[:13], repeat=3)]
    share = sum(split_of(puzzle, 0.3) == "test" for puzzle in every) / len(every)
    assert 0.26 < share < 0.34


@pytest.mark.parametrize("share", [-0.1, 0.0, 1.0, 1.5])
def test_a_share_that_leaves_a_split_empty_is_refused(share):
    with pytest.raises(ConfigError, match=r"test_share must lie in 0\.001\.\.0\.999, got"):
        split_of(Puzzle((Claim(0, is_knight=True),)), share)
