import ast
import re
from itertools import product

import pytest
from hypothesis import assume, given

from knights_reading import read_compact, split_symbols
from sortedrl.data.knights_puzzle import Claim, Puzzle, parse_puzzle
from sortedrl.data.knights_rows import StatementShape, generate
from sortedrl.data.knights_wording import PEOPLE, compact_answer, compact_prompt, compact_trace
from test_knights_puzzle import is_true, puzzles
from test_knights_solver import brute_force

RESPONSE = re.compile(r"<think>(.+)</think><answer>([A-Ha-h]+)</answer>")
CHECK = re.compile(r"([A-Ha-h]):([^/]+)/([01])([+-])")


@given(puzzles(most=8))
def test_a_prompt_gives_the_puzzle_back(puzzle):
    prompt = compact_prompt(puzzle)
    assert read_compact(prompt) == puzzle
    assert "".join(split_symbols(prompt)) == prompt


def check_values(text, roles):
    """Reads `(A1&b0)0`-like text, checks the value behind every part, and gives the last."""

    def checked(value, rest):
        assert rest[0] == str(int(value))
        return value, rest[1:]

    def part(rest):
        if rest[0] == "!":
            inner, rest = part(rest[1:])
            # The value of a negation that is the whole statement stands behind the `/` alone.
            return checked(not inner, rest) if rest else (not inner, rest)
        if rest[0] == "(":
            value, rest = joined(rest[1:])
            assert rest[0] == ")"
            return checked(value, rest[1:])
        return checked(roles[PEOPLE.index(rest[0].upper())] == rest[0].isupper(), rest[1:])

    def joined(rest):
        first, rest = part(rest)
        parts, kind = [first], rest[:1]
        if kind not in tuple("&|>="):
            return first, rest
        while rest[:1] == kind:
            value, rest = part(rest[1:])
            parts.append(value)
        joins = {"&": all, "|": any, ">": lambda p: p[1] >= p[0], "=": lambda p: p[0] == p[1]}
        return joins[kind](parts), rest

    value, rest = joined(text)
    assert not rest
    return value


def without_values(text):
    return re.sub(r"[01]", "", text)


def check(prompt, response):
    """The answer of a response whose every symbol was checked against prompt and candidate."""
    said = dict(part.split(":") for part in prompt[:-1].split(";"))
    order = product((True, False), repeat=len(said))
    order = iter([tuple(reversed(roles)) for roles in order])
    thoughts, answer = RESPONSE.fullmatch(response).groups()
    start, *candidates = thoughts.split("#")
    assert start == ""
    for number, candidate in enumerate(candidates):
        letters, checks = candidate[: len(said)], candidate[len(said) :]
        roles = next(order)
        assert letters == "".join(
            name if role else name.lower() for name, role in zip(said, roles, strict=True)
        )
        found = CHECK.findall(checks)
        assert "".join(f"{a}:{b}/{c}{d}" for a, b, c, d in found) == checks
        for place, (speaker, evaluated, value, verdict) in enumerate(found):
            assert speaker == letters[place]
            assert without_values(evaluated) == said[speaker.upper()]
            assert check_values(evaluated, roles) == (value == "1")
            assert (verdict == "+") == ((value == "1") == roles[place])
            assert verdict == "+" or place == len(found) - 1
        is_last = number == len(candidates) - 1
        assert (found[-1][-1] == "+") == is_last
        if is_last:
            assert len(found) == len(said)
            assert answer == letters
    return tuple(letter.isupper() for letter in answer)


@given(puzzles(most=5))
def test_every_symbol_of_a_trace_follows_and_it_ends_in_a_solution(puzzle):
    solutions = brute_force(puzzle.text)
    assume(solutions)
    response = compact_trace(puzzle)
    assert check(compact_prompt(puzzle), response) in solutions
    assert "".join(split_symbols(response)) == response


@pytest.mark.parametrize("people", range(2, 8))
def test_generated_puzzles_are_explained_symbol_by_symbol(people):
    for puzzle in generate(people, 5, shape=StatementShape(depth=2, width=3)):
        roles = check(compact_prompt(puzzle), compact_trace(puzzle))
        assert {roles} == brute_force(puzzle.text)


@given(puzzles(most=8))
def test_an_answer_gives_the_roles_back(puzzle):
    said = ast.literal_eval(puzzle.text)
    roles = tuple(is_true(statement, (True,) * puzzle.people) for statement in said)
    answer = compact_answer(roles)
    assert answer.upper() == PEOPLE[: puzzle.people]
    assert tuple(map(str.isupper, answer)) == roles


def test_the_example_of_the_page_is_what_is_written():
    prompt = "A:B&c;B:a|C;C:A>B?"
    wanted = "<think>#ABCA:B1&c0/0-#aBCa:B1&c0/0+B:a1|C1/1+C:A0>B1/1+</think><answer>aBC</answer>"
    assert compact_trace(read_compact(prompt)) == wanted


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("(('not', ('telling-truth', 0)),)", "A:!A?"),
        ("(('not', ('not', ('lying', 0))),)", "A:!!a?"),
        ("(('not', ('and', ('lying', 0), ('telling-truth', 0))),)", "A:!(a&A)?"),
        ("(('and', ('not', ('lying', 0)), ('telling-truth', 0), ('lying', 0)),)", "A:!a&A&a?"),
        ("(('<=>', ('or', ('lying', 0), ('lying', 0)), ('lying', 0)),)", "A:(a|a)=a?"),
        (
            "(('->', ('lying', 0), ('->', ('lying', 0), ('not', ('lying', 0)))),)",
            "A:a>(a>!a)?",
        ),
    ],
)
def test_every_form_has_its_symbol(text, prompt):
    assert compact_prompt(parse_puzzle(text)) == prompt


def test_a_deep_statement_is_evaluated_from_the_inside():
    puzzle = parse_puzzle(
        "(('not', ('<=>', ('telling-truth', 0), ('not', ('lying', 1)))), ('telling-truth', 0))"
    )
    assert compact_trace(puzzle) == (
        "<think>#ABA:!(A1=!b01)1/0-#aBa:!(A0=!b01)0/1-#AbA:!(A1=!b10)0/1+b:A1/1-"
        "#aba:!(A0=!b10)1/0+b:A0/0+</think><answer>ab</answer>"
    )


def test_lengths_have_a_long_tail():
    puzzles = [puzzle for people in (3, 4, 5) for puzzle in generate(people, 150)]
    lengths = sorted(len(split_symbols(compact_trace(puzzle))) for puzzle in puzzles)
    median = lengths[len(lengths) // 2]
    assert lengths[-1] > 4 * median
    assert sum(lengths) / len(lengths) > 1.2 * median


def test_what_has_no_letters_or_no_solution_is_refused():
    with pytest.raises(ValueError, match="letters for 8 people, got 9"):
        compact_prompt(Puzzle(tuple(Claim(person, is_knight=True) for person in range(9))))
    with pytest.raises(ValueError, match="must have a solution"):
        compact_trace(Puzzle((Claim(0, is_knight=False),)))
