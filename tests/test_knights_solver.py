import ast
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.data.knights_puzzle import (
    Claim,
    Puzzle,
    assignment,
    everything,
    holds,
    knight_sets,
    members,
    number_of,
    parse_puzzle,
    solutions,
    truth_set,
)
from test_knights_puzzle import is_true, puzzles


def brute_force(text):
    """Every solution of a published text, by trying all roles without our classes."""
    said = ast.literal_eval(text)
    return {
        roles
        for roles in product((True, False), repeat=len(said))
        if all(is_true(s, roles) == role for s, role in zip(said, roles, strict=True))
    }


@given(puzzles(most=6))
def test_the_solutions_are_those_of_brute_force(puzzle):
    found = solutions(puzzle)
    assert len(set(found)) == len(found)
    assert set(found) == brute_force(puzzle.text)


@given(puzzles(most=4))
def test_the_truth_set_holds_the_assignments_that_make_a_statement_true(puzzle):
    for statement in puzzle.statements:
        numbers = list(members(truth_set(statement, puzzle.people)))
        every = range(1 << puzzle.people)
        assert numbers == [n for n in every if holds(statement, assignment(n, puzzle.people))]


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, 2**n - 1))))
def test_numbers_and_assignments_are_the_same_thing(case):
    people, number = case
    roles = assignment(number, people)
    assert number_of(roles) == number
    assert [knights >> number & 1 for knights in knight_sets(people)] == list(roles)


def test_person_0_changes_fastest_and_knights_come_first():
    pairs = [(True, True), (False, True), (True, False), (False, False)]
    assert [assignment(number, 2) for number in range(4)] == pairs
    assert everything(2) == 0b1111


def test_a_known_puzzle_is_solved():
    """A: we are both knaves. B: nothing new."""
    text = "(('and', ('lying', 0), ('lying', 1)), ('or', ('telling-truth', 1), ('lying', 1)))"
    assert solutions(parse_puzzle(text)) == [(False, True)]


def test_puzzles_without_and_with_many_solutions_are_told_apart():
    assert solutions(Puzzle((Claim(0, False),))) == []
    assert len(solutions(Puzzle(tuple(Claim(person, True) for person in range(8))))) == 256


def test_too_many_people_are_refused():
    with pytest.raises(ValueError, match=r"takes 1\.\.16 people, got 17"):
        solutions(Puzzle(tuple(Claim(person, True) for person in range(17))))
