import ast
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.data.knights_puzzle import (
    MAX_DEPTH,
    Claim,
    Compound,
    Puzzle,
    holds,
    mentioned,
    parse_puzzle,
)

KINDS = ("not", "and", "or", "->", "<=>")


def depth(statement):
    """Connectives on the longest way down to a claim; 0 for a claim."""
    parts = () if isinstance(statement, Claim) else statement.parts
    return max((1 + depth(part) for part in parts), default=0)


def random_statement(people, generator, *, depth):
    """A statement about that many people, nested freely."""
    if depth == 0 or generator.random() < 0.3:
        return Claim(generator.randrange(people), generator.random() < 0.5)
    kind = generator.choice(KINDS)
    parts = {"not": 1, "and": generator.randint(2, 4), "or": generator.randint(2, 4)}.get(kind, 2)
    inner = [random_statement(people, generator, depth=depth - 1) for _ in range(parts)]
    return Compound(kind, tuple(inner))


def random_puzzle(people, depth, seed):
    """Any puzzle: with no solution, one, or several."""
    generator = random.Random(seed)
    said = [random_statement(people, generator, depth=depth) for _ in range(people)]
    return Puzzle(tuple(said))


def puzzles(*, least=1, most=5, depth=3):
    """Drawn from seeds: many times faster than a recursive strategy."""
    numbers = st.integers(0, 2**32)
    return st.builds(random_puzzle, st.integers(least, most), st.integers(0, depth), numbers)


def assignments(people):
    return st.tuples(*[st.booleans()] * people)


def is_true(said, roles):
    """What the published tuple says, worked out without our classes."""
    word, *rest = said
    if word in ("telling-truth", "lying"):
        return roles[rest[0]] == (word == "telling-truth")
    values = [is_true(part, roles) for part in rest]
    return {
        "not": lambda: not values[0],
        "and": lambda: False not in values,
        "or": lambda: True in values,
        "->": lambda: values in ([False, False], [False, True], [True, True]),
        "<=>": lambda: values in ([False, False], [True, True]),
    }[word]()


@given(puzzles())
def test_the_text_gives_the_puzzle_back(puzzle):
    assert parse_puzzle(puzzle.text) == puzzle


@given(puzzles().flatmap(lambda puzzle: st.tuples(st.just(puzzle), assignments(puzzle.people))))
def test_a_statement_is_true_exactly_if_the_published_tuple_is(case):
    puzzle, roles = case
    for statement, said in zip(puzzle.statements, ast.literal_eval(puzzle.text), strict=True):
        assert holds(statement, roles) == is_true(said, roles)


@given(puzzles(least=2))
def test_joining_adds_one_to_the_depth_and_brings_the_people_together(puzzle):
    one, other, *_ = puzzle.statements
    both = Compound("and", (one, other))
    assert depth(both) == 1 + max(depth(one), depth(other))
    assert mentioned(both) == mentioned(one) | mentioned(other)


def test_the_text_is_that_of_the_published_sets():
    text = "(('->', ('lying', 1), ('not', ('telling-truth', 0))), ('telling-truth', 0))"
    puzzle = parse_puzzle(text)
    assert puzzle.statements == (
        Compound("->", (Claim(1, False), Compound("not", (Claim(0, True),)))),
        Claim(0, True),
    )
    assert puzzle.text == text
    assert [depth(statement) for statement in puzzle.statements] == [2, 0]
    assert parse_puzzle("(('lying', 0),)").people == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "nested tuples"),
        ("__import__('os')", "nested tuples"),
        ("(('lying', 0)", "nested tuples"),
        ("(" * 5000, "nested tuples"),
        ("\0", "nested tuples"),
        ("'lying'", "must be a tuple"),
        ("[('lying', 0)]", "must be a tuple"),
        ("()", "at least one person"),
        ("('lying', 0)", "a statement must be a tuple"),
        ("((),)", "a statement must be a tuple"),
        ("(('lying', 1),)", "speaks of person 1"),
        ("(('lying', -1),)", "speaks of person -1"),
        ("(('lying', True),)", "one person's number"),
        ("(('lying', 0, 0),)", "one person's number"),
        ("(('lying', '0'),)", "one person's number"),
        ("(('lie', 0),)", "must start with one of"),
        ("(({}, 0),)", "must start with one of"),
        ("(('not', ('lying', 0), ('lying', 0)),)", "'not' joins 1 statements, got 2"),
        ("(('and', ('lying', 0)),)", "'and' joins at least 2 statements, got 1"),
        ("(('->', ('lying', 0)),)", "'->' joins 2 statements, got 1"),
        ("(('<=>', 0, 1),)", "a statement must be a tuple"),
    ],
)
def test_malformed_text_is_refused_with_the_reason(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_puzzle(text)


def test_nesting_is_read_up_to_its_limit():
    def nested(times):
        return "(" + "('not', " * times + "('lying', 0)" + ")" * times + ",)"

    assert depth(parse_puzzle(nested(MAX_DEPTH)).statements[0]) == MAX_DEPTH
    with pytest.raises(ValueError, match="nested deeper"):
        parse_puzzle(nested(MAX_DEPTH + 1))


def test_an_unknown_connective_is_refused():
    with pytest.raises(ValueError, match="must be one of not, and, or, ->, <=>"):
        Compound("xor", (Claim(0, True), Claim(1, True)))
