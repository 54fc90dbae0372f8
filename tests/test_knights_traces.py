import ast
import re
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from knights_reading import read_statement
from sortedrl.data.knights_puzzle import parse_puzzle
from sortedrl.data.knights_rows import StatementShape, generate
from sortedrl.data.knights_wording import Roles, answer_text, draw_names, trace
from test_knights_puzzle import is_true, puzzles
from test_knights_solver import brute_force

RESPONSE = re.compile(r"<think>\n(.+)\n</think><answer>\n(.+)\n</answer>", re.DOTALL)
SUPPOSE = re.compile(r"Suppose ([^.]+)\. (.+)")
RULED_OUT = re.compile(r'Then (\w+), an? (\w+), would say something (true|false): "(.+)\."')
BACK = re.compile(r"Neither role is left for (\w+), so back to (\w+)\.")
FITS = re.compile(r"(\w+) is an? (\w+), and it is (true|false) that (.+)\.")


class Checker:
    """Follows a trace line by line, and believes nothing that it cannot check."""

    def __init__(self, puzzle, names):
        self.names = names
        self.said = ast.literal_eval(puzzle.text)
        self.statements = puzzle.statements
        self.people = len(names)
        self.given = None
        self.is_ruled_out = False

    def next_roles(self):
        """What must be tried now: knight first, and the last knight becomes a knave."""
        if self.given is None:
            return (True,)
        if not self.is_ruled_out:
            return (*self.given, True)
        kept = list(self.given)
        while not kept.pop():
            assert kept, "everything was ruled out"
        return (*kept, False)

    def values(self, speaker, given):
        """The values a statement can have while these roles stand."""
        rest = product((True, False), repeat=self.people - len(given))
        return {is_true(self.said[speaker], (*given, *others)) for others in rest}

    def suppose(self, listed, verdict):
        given = tuple(re.findall(r"(\w+) is an? (\w+)", listed))
        roles = tuple(word == "knight" for _, word in given)
        assert [name for name, _ in given] == list(self.names[: len(given)])
        assert roles == self.next_roles()
        ruled_out = [s for s, role in enumerate(roles) if self.values(s, roles) == {not role}]
        match = RULED_OUT.fullmatch(verdict)
        if match is None:
            assert verdict == "Nothing speaks against it so far."
            assert not ruled_out
        else:
            name, word, truth, words = match.groups()
            speaker = self.names.index(name)
            assert speaker == ruled_out[0]
            assert (word == "knight") == roles[speaker] == (truth == "false")
            assert read_statement(words, self.names) == self.statements[speaker]
        self.given, self.is_ruled_out = roles, match is not None

    def back(self, left, to):
        assert self.is_ruled_out
        assert not self.given[-1]
        assert left == self.names[len(self.given) - 1]
        assert to == self.names[len(self.next_roles()) - 1]

    def fits(self, number, name, word, truth, words):
        assert not self.is_ruled_out
        assert len(self.given) == self.people
        assert name == self.names[number]
        assert (word == "knight") == self.given[number]
        assert is_true(self.said[number], self.given) == (truth == "true") == self.given[number]
        assert read_statement(words, self.names) == self.statements[number]


def check(puzzle, names, response):
    """The solution a response reaches, after every line of it was checked."""
    thoughts, answer = RESPONSE.fullmatch(response).groups()
    checker = Checker(puzzle, names)
    _, *steps = thoughts.split("\n")
    cut = steps.index("Now everyone has a role, and what they say fits it:")
    wants_back = False
    for line in steps[:cut]:
        assert bool(BACK.fullmatch(line)) == wants_back
        if wants_back:
            checker.back(*BACK.fullmatch(line).groups())
            wants_back = False
        else:
            checker.suppose(*SUPPOSE.fullmatch(line).groups())
            wants_back = checker.is_ruled_out and not checker.given[-1]
    assert len(steps[cut + 1 :]) == puzzle.people
    for number, line in enumerate(steps[cut + 1 :]):
        checker.fits(number, *FITS.fullmatch(line).groups())
    assert answer == answer_text(names, checker.given)
    return checker.given


@given(puzzles(most=5), st.integers(0, 2**32))
def test_every_line_of_a_trace_follows_and_it_ends_in_a_solution(puzzle, seed):
    solutions = brute_force(puzzle.text)
    assume(solutions)
    names = draw_names(puzzle.people, seed)
    assert check(puzzle, names, trace(puzzle, names)) in solutions


@pytest.mark.parametrize("people", range(2, 8))
def test_generated_puzzles_are_explained_line_by_line(people):
    for number, puzzle in enumerate(generate(people, 6, shape=StatementShape(depth=2, width=3))):
        names = draw_names(people, number)
        assert {check(puzzle, names, trace(puzzle, names))} == brute_force(puzzle.text)


def test_a_small_puzzle_is_explained_in_these_words():
    puzzle = parse_puzzle("(('lying', 1), ('and', ('lying', 0), ('lying', 1)))")
    assert trace(puzzle, ("Ada", "Bo"), roles=Roles("angel", "devil")) == (
        "<think>\n"
        "I give out roles one person at a time, and take the last one back if it cannot stand.\n"
        "Suppose Ada is an angel. Nothing speaks against it so far.\n"
        "Suppose Ada is an angel and Bo is an angel. Then Ada, an angel, would say something "
        'false: "Bo is a devil."\n'
        "Suppose Ada is an angel and Bo is a devil. Nothing speaks against it so far.\n"
        "Now everyone has a role, and what they say fits it:\n"
        "Ada is an angel, and it is true that Bo is a devil.\n"
        "Bo is a devil, and it is false that Ada is a devil and Bo is a devil.\n"
        "</think><answer>\n(1) Ada is an angel\n(2) Bo is a devil\n</answer>"
    )


def test_traces_of_one_level_differ_widely_in_length():
    puzzles = generate(6, 100)
    names = draw_names(6, 0)
    lengths = sorted(len(trace(puzzle, names).split()) for puzzle in puzzles)
    assert lengths[90] > 2.5 * lengths[10]


def test_a_puzzle_without_a_solution_is_refused():
    with pytest.raises(ValueError, match="must have a solution to be explained"):
        trace(parse_puzzle("(('lying', 0),)"), ("Ada",))
