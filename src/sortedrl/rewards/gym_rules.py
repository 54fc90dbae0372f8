r"""How the answer of every reasoning-gym task is parsed and judged.

A model is rewarded for whatever passes, so two things hold for each task of `RULES`:

    no code     a scorer of the library that evaluates text (of the answer or the row) is never
                called: such a task is judged here, by parsing, and no part of an answer is run
    one form    the whole answer must have the form that the task asks for: one finite number,
                a JSON list of texts, moves ...; its size is bounded

A task without a rule is refused, since its scorer has not been reviewed. To add one, read its
`score_answer` and everything it calls, and choose:

    Rule("text")                            the library only compares texts
    Rule("moves", form)                     the library checks many right answers, once `form` has
                                            refused what it would wrongly accept or fail on
    Rule("numbers", form, judge)            `judge` decides whether the answer is right; the library
                                            only gives partial credit to a wrong one
    Rule("formula", form, judge, False)     the library is not called at all
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from types import MappingProxyType
from typing import Any

from sortedrl.rewards.gym_formulas import (
    Entry,
    RefusedError,
    has_conclusion,
    is_antiderivative,
    is_conclusion,
    is_product,
    makes_24,
    makes_target,
    refuse_unless,
)

Form = Callable[[str, Entry], str]
Judge = Callable[[str, Entry], float]

_LONGEST_NUMBER = 100
_DEEPEST = 100
_MOST_MOVES = 1_000


@dataclass(frozen=True, slots=True)
class Rule:
    """How the answer of one task is read and judged."""

    reads: str
    """The form of a valid answer, as a short text."""
    form: Form | None = None
    """Returns the answer to judge, or raises `RefusedError`; without it any text is accepted."""
    judge: Judge | None = None
    """1 for a right answer; without it the library judges."""
    asks_library: bool = True
    """Whether the library's scorer is called, and gives partial credit."""
    is_fair: Callable[[Entry], bool] | None = None
    """Whether a row has a right answer; rows without one are skipped."""


# Texts.


def _squeezed(text: str) -> str:
    return " ".join(text.casefold().split())


def _same_text(answer: str, entry: Entry) -> float:
    return float(_squeezed(answer) == _squeezed(entry["answer"]))


def _same_letters(answer: str, entry: Entry) -> float:
    return float("".join(answer.casefold().split()) == entry["answer"].strip().casefold())


def _same_words(answer: str, entry: Entry) -> float:
    words = [word.strip() for word in answer.split(",")]
    return float(words == entry["metadata"]["sorted_words"])


def _matching(pattern: str) -> Form:
    """Only what the pattern matches in full; patterns must not backtrack."""
    compiled = re.compile(pattern, re.ASCII)

    def form(answer: str, _: Entry) -> str:
        refuse_unless(compiled.fullmatch(answer))
        return answer

    return form


def _parsed_by(read: Callable[[str], object]) -> Form:
    """Only what `read` does not refuse."""

    def form(answer: str, _: Entry) -> str:
        read(answer)
        return answer

    return form


def _lines_matching(pattern: str) -> Form:
    compiled = re.compile(pattern, re.ASCII)

    def form(answer: str, _: Entry) -> str:
        lines = [" ".join(line.split()) for line in answer.splitlines() if line.strip()]
        refuse_unless(len(lines) <= _MOST_MOVES and all(map(compiled.fullmatch, lines)))
        return "\n".join(lines)

    return form


def _words_matching(pattern: str, *, separators: str = "") -> Form:
    """Words of one pattern between white space and separators, joined by spaces."""
    compiled = re.compile(pattern, re.ASCII)
    blanks = str.maketrans(separators, " " * len(separators))

    def form(answer: str, _: Entry) -> str:
        words = answer.replace("->", " ").translate(blanks).split()
        refuse_unless(0 < len(words) <= _MOST_MOVES and all(map(compiled.fullmatch, words)))
        return " ".join(words)

    return form


def _roles(answer: str, entry: Entry) -> str:
    """Only names and roles: the library would ignore `not`, `or` and the like."""
    terms = entry["metadata"]["knight_knave_terms"]
    known = {"is", "a", "an", "and", terms["knight"], terms["knave"], *entry["metadata"]["names"]}
    words = re.sub(r"[.,()\s]", " ", answer).casefold().split()
    refuse_unless(set(words) <= {word.casefold() for word in known})
    refuse_unless(all(words.count(name.casefold()) == 1 for name in entry["metadata"]["names"]))
    return answer


def _letters_to_digits(answer: str, _: Entry) -> str:
    """A digit for each letter, and no letter twice."""
    pairs = [pair.strip() for pair in answer.split(",")]
    refuse_unless(all(re.fullmatch(r"[A-Z] ?= ?[0-9]", pair) for pair in pairs))
    refuse_unless(len({pair[0] for pair in pairs}) == len(pairs))
    return ",".join(pairs)


def _pushes(answer: str, entry: Entry) -> str:
    """Steps in Sokoban; a step into a wall does nothing, so long answers are refused."""
    steps = "".join(answer.replace(",", " ").split())
    refuse_unless(re.fullmatch("[LRUD]+", steps) and len(steps) <= 4 * len(entry["answer"]) + 20)
    return steps


# Numbers.

_NUMBER = re.compile(
    r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d*+)?|\d++(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d{1,3})?", re.ASCII
)


def number(text: str) -> Fraction:
    """The finite number a text is; commas may stand between thousands."""
    text = text.strip()
    refuse_unless(len(text) <= _LONGEST_NUMBER and _NUMBER.fullmatch(text))
    return Fraction(text.replace(",", ""))


def _one_number(answer: str, _: Entry) -> str:
    answer = answer.strip().removeprefix("$")
    number(answer)
    return answer.strip()


def _listed(text: str, *, separator: str | None = ",") -> list[Fraction]:
    """Numbers one after the other; brackets around them and a degree sign do not count."""
    return [number(part) for part in text.strip(" \t\n()[]\u00b0").split(separator)]


def _within(
    unit: str, read: Callable[[str], list[Fraction]] = lambda text: [number(text)]
) -> Judge:
    """As many numbers as the gold has, none further off than `unit`."""

    def judge(answer: str, entry: Entry) -> float:
        found, gold = read(answer), read(entry["answer"])
        pairs = zip(found, gold, strict=False)
        is_near = all(abs(one - other) <= Fraction(unit) for one, other in pairs)
        return float(len(found) == len(gold) and is_near)

    return judge


def _geometry(answer: str, entry: Entry) -> float:
    unit = "0.005" if entry["metadata"]["task_type"] == "angle_measure" else "0.0005"
    return _within(unit, _listed)(answer, entry)


def _factorization(answer: str, _: Entry) -> str:
    parts = [part.strip() for part in answer.split("\u00d7")]
    refuse_unless(all(re.fullmatch("[0-9]{1,30}", part) for part in parts))
    return " \u00d7 ".join(parts)


def _roots(text: str) -> list[Fraction]:
    """The roots in order; none are written as nothing or as two quotation marks."""
    return [] if text.strip() in {"", '""', "''"} else sorted(_listed(text))


def _eleven_digits(answer: str, entry: Entry) -> float:
    """The gold is rounded to 12 digits at each step, so that its last ones may be off."""
    gold = number(entry["answer"])
    return float(abs(number(answer) - gold) <= Fraction("1e-11") * max(abs(gold), Fraction(1)))


def _nearest_candidate(answer: str, entry: Entry) -> float:
    found, solution = number(answer), Fraction(entry["metadata"]["solution"])
    others = [abs(found - Fraction(one)) for one in entry["metadata"]["candidates"]]
    distance = abs(found - solution)
    return float(distance < Fraction(1, 2000) and distance == min(others))


def _probability(answer: str, entry: Entry) -> float:
    """Within an absolute and a relative tolerance, since rare events are all near 0."""
    above, slash, below = answer.partition("/")
    gold = Fraction(*(entry["metadata"]["rational"][k] for k in ("numerator", "denominator")))
    refuse_unless(not slash or number(below))
    found = number(above) / (number(below) if slash else 1)
    return float(abs(found - gold) <= min(Fraction(1, 10_000), gold / 200))


_COMPLEX = re.compile(r"([-+]?[\d.]++(?![ij]))?(?:([-+]?)([\d.]*+)[ij])?", re.ASCII)


def _complex(text: str) -> tuple[Fraction, Fraction]:
    text = "".join(text.split()).lower().strip("()")
    found = _COMPLEX.fullmatch(text)
    refuse_unless(text and found)
    assert found is not None
    real, sign, imaginary = found.groups()
    refuse_unless(real is None or imaginary is None or sign)
    size = Fraction(0) if imaginary is None else number(imaginary or "1")
    return number(real or "0"), -size if sign == "-" else size


def _same_complex(answer: str, entry: Entry) -> float:
    pairs = zip(_complex(answer), _complex(entry["answer"]), strict=True)
    return float(all(abs(one - other) <= Fraction(1, 200) for one, other in pairs))


def _integer(answer: str, entry: Entry) -> float:
    """An integer, also in hexadecimal, octal or binary."""
    pattern = r"[-+]?(?:0[xX][0-9a-fA-F]{1,80}|0[oO][0-7]{1,80}|0[bB][01]{1,99}|0|[1-9]\d{0,80})"
    refuse_unless(re.fullmatch(pattern, answer, re.ASCII))
    return float(int(answer, 0) == int(entry["answer"], 0))


def _same_table(answer: str, entry: Entry) -> float:
    """Numbers in rows and columns, right to the second decimal."""
    found = [_listed(line, separator=None) for line in answer.splitlines() if line.strip()]
    gold = entry["metadata"]["solution"]
    if [len(row) for row in found] != [len(row) for row in gold]:
        return 0.0
    pairs = zip(chain(*found), chain(*gold), strict=True)
    unit = Fraction("0.005000001")
    return float(all(abs(one - Fraction(other)) <= unit for one, other in pairs))


# JSON.


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object in which each key occurs once, so that there is only one answer."""
    refuse_unless(len({key for key, _ in pairs}) == len(pairs))
    return dict(pairs)


def _finite(text: str) -> float:
    refuse_unless(math.isfinite(float(text)))
    return float(text)


def _no_constant(_: str) -> None:
    raise RefusedError


def _json(text: str) -> Any:  # noqa: ANN401
    depth = 0
    for char in text:
        depth += (char in "[{") - (char in "]}")
        refuse_unless(depth <= _DEEPEST)
    try:
        return json.loads(
            text, object_pairs_hook=_once, parse_float=_finite, parse_constant=_no_constant
        )
    except ValueError as error:
        raise RefusedError from error


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _are(kind: type, values: object) -> bool:
    """Whether this is a list of values of exactly this type."""
    return isinstance(values, list) and all(type(value) is kind for value in values)


def _texts(answer: str, _: Entry) -> str:
    value = _json(answer)
    refuse_unless(_are(str, value))
    return _canonical(value)


def _lists_of_texts(answer: str, _: Entry) -> str:
    value = _json(answer)
    refuse_unless(_are(list, value) and all(_are(str, one) and one for one in value))
    return _canonical(value)


def _moves_or_no(answer: str, entry: Entry) -> str:
    return answer if answer.strip().casefold() == "no" else _texts(answer, entry)


def _colours(answer: str, entry: Entry) -> str:
    """A colour for every vertex, and for nothing else."""
    value = _json(answer)
    refuse_unless(isinstance(value, dict) and all(type(one) is int for one in value.values()))
    refuse_unless(set(value) == set(map(str, entry["metadata"]["puzzle"]["vertices"])))
    return _canonical(value)


_BOX_MOVE = re.compile(r"move\(box_\w++, (?:target_\w++|square\[[\d.]++, [\d.]++\])\)", re.ASCII)
_AGENT = re.compile(r"(?:Agent ?)?\[?\d{1,3}(?:\.\d)?, ?\d{1,3}(?:\.\d)?\]?", re.ASCII)


def _box_moves(answer: str, _: Entry) -> str:
    """One action per agent in each step; only boxes may be moved."""
    value = _json(answer)
    refuse_unless(_are(dict, value) and len(value) <= _MOST_MOVES)
    for step in value:
        refuse_unless(all(map(_AGENT.fullmatch, step)) and _are(str, list(step.values())))
        refuse_unless(all(map(_BOX_MOVE.fullmatch, step.values())))
    return _canonical(value)


def _same_json(answer: str, entry: Entry) -> float:
    return float(_canonical(_json(answer)) == _canonical(_json(entry["answer"])))


def _same_value(answer: str, entry: Entry) -> float:
    """The same text, or the same JSON object however it is written."""
    gold = entry["answer"].strip()
    if answer.strip() == gold or not gold.startswith("{"):
        return float(answer.strip() == gold)
    return _same_json(answer, entry)


def _same_numbers(answer: str, entry: Entry) -> float:
    """A list of numbers, which may stand in quotation marks of either kind."""
    lists = [_json(text.replace("'", '"')) for text in (answer, entry["answer"])]
    refuse_unless(all(isinstance(one, list) and len(one) <= _MOST_MOVES for one in lists))
    found, gold = ([number(str(one)) for one in values] for values in lists)
    return float(found == gold)


def _in_lines(text: str, *, joiner: str) -> tuple[str, bool]:
    """An answer in lines, and whether it was written as a list, or a list of rows, instead."""
    if not text.startswith("["):
        return text, False
    value = _json(text.replace("'", '"'))
    rows = value if _are(list, value) else [value]
    refuse_unless(all(_are(str, row) or _are(int, row) for row in rows))
    return "\n".join(joiner.join(map(str, row)) for row in rows), True


def _in_lines_equal(
    list_score: float, golds: Callable[[Entry], Sequence[str]], joiner: str
) -> Judge:
    """1 for one of the golds; less if the answer is a list instead of lines."""

    def judge(answer: str, entry: Entry) -> float:
        lines, is_list = _in_lines(answer, joiner=joiner)
        return (list_score if is_list else 1.0) * float(lines in golds(entry))

    return judge


_rows_of_numbers = _in_lines_equal(0.1, lambda entry: [entry["answer"].strip()], " ")
_letters = _in_lines_equal(0.1, lambda entry: [entry["answer"]], "")
_board = _in_lines_equal(0.5, lambda entry: entry["metadata"]["valid_answers"], " ")


# Moves.

_SIDE = 6
_EXIT = 2 * _SIDE + _SIDE - 2


def _parked(answer: str, entry: Entry) -> float:
    """Whether moves in Rush Hour, all of them legal, bring car A to the exit.

    The library skips illegal moves, so enough random ones would solve the puzzle.
    """
    board = entry["metadata"]["board_config"]
    labels = sorted(set(board) - set("ox"))
    cars = {
        chr(ord("A") + number): [cell for cell, one in enumerate(board) if one == label]
        for number, label in enumerate(labels)
    }
    free = {cell for cell, one in enumerate(board) if one == "o"}
    moves = answer.replace(",", " ").split()
    refuse_unless(len(moves) <= _MOST_MOVES)
    for move in moves:
        refuse_unless(re.fullmatch("[A-Z][-+][1-5]", move))
        if move[0] not in cars:
            return 0.0
        for _ in range(int(move[2])):
            car = cars[move[0]]
            stride = car[1] - car[0]
            head, tail = (car[-1], car[0]) if move[1] == "+" else (car[0], car[-1])
            step = stride if move[1] == "+" else -stride
            is_same_row = stride != 1 or head // _SIDE == (head + step) // _SIDE
            if head + step not in free or not is_same_row:
                return 0.0
            free = free - {head + step} | {tail}
            cars[move[0]] = sorted({*car, head + step} - {tail})
    return float(cars["A"][0] == _EXIT)


_FRACTION = (
    r"\$? ?\\d?frac ?\{ ?\d{1,50} ?\} ?\{ ?\d{1,50} ?\} ?\$?|\$? ?-?\d{1,50} ?/ ?\d{1,50} ?\$?"
)
_CLOCK = r"\d{1,3}:\d\d(?::\d\d(?:\.\d{1,6})?)?"
_MOVE = r"Move disk \d{1,3} from Peg \d{1,3} to Peg \d{1,3}"
_TEXT = Rule("text")
_TEXTS = """
    ab acre aiw arc_1d arc_agi base_conversion basic_arithmetic bf binary_alternation
    caesar_cipher circuit_logic color_cube_rotation count_bits count_primes
    course_schedule dice emoji_mystery family_relationships futoshiki gcd
    isomorphic_strings largest_island lcm leg_counting letter_counting list_functions
    mahjong_puzzle manipulate_matrix maze mini_sudoku modulo_grid needle_haystack
    number_filtering number_sequence palindrome_generation path_star ransom_note rearc
    rotate_matrix rotten_oranges self_reference sentence_reordering shortest_path
    simple_equations simple_geometry string_manipulation string_splitting string_synthesis
    sudoku syllogism tsumego word_ladder word_sequence_reversal zebra_puzzles
"""

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(
            _TEXTS.split(),
            _TEXT,
        ),
        # The library gives these more than 0.99, or 1, for answers that are nearly right.
        "calendar_arithmetic": Rule("text", None, _same_text),
        "figlet_font": Rule("text", None, _same_letters),
        "game_of_life_halting": Rule("text", None, _same_text, False),
        "letter_jumble": Rule("text", None, _same_text),
        "spell_backward": Rule("text", None, _same_text),
        "word_sorting": Rule("text", None, _same_words),
        # Numbers.
        "advanced_geometry": Rule("numbers", _parsed_by(_listed), _geometry),
        "bitwise_arithmetic": Rule("number", None, _integer, False),
        "chain_sum": Rule("number", _one_number, _within("0")),
        "coin_flip": Rule("number or fraction", None, _probability, False),
        "complex_arithmetic": Rule("complex number", _parsed_by(_complex), _same_complex),
        "decimal_arithmetic": Rule("number", _one_number, _eleven_digits, False),
        "decimal_chain_sum": Rule("number", _one_number, _within("0"), False),
        "fraction_simplification": Rule("fraction", _matching(_FRACTION)),
        "gsm_symbolic": Rule("number", _one_number, _within("0"), False),
        "kakurasu": Rule("grid of numbers", _lines_matching(r"[01](?: [01])*+")),
        "number_format": Rule("number", _one_number, _nearest_candidate, False),
        "number_sorting": Rule("list of numbers", None, _same_numbers, False),
        "polynomial_equations": Rule("numbers", _parsed_by(_roots), _within("5e-5", _roots)),
        "pool_matrix": Rule("grid of numbers", None, _same_table, False),
        "power_function": Rule("number", _one_number),
        "prime_factorization": Rule("numbers", _factorization),
        "products": Rule("number", _one_number, _within("0")),
        "rectangle_count": Rule("number", _matching(r"\d{1,20}")),
        "survo": Rule("grid of numbers", _lines_matching(r"-?\d++(?: -?\d++)*+")),
        "time_intervals": Rule(
            "duration", _matching(rf"\d{{1,7}}(?: days?)?(?:, ?{_CLOCK})?|{_CLOCK}")
        ),
        # JSON.
        "boxnet": Rule("JSON moves", _box_moves),
        "codeio": Rule("text or JSON", None, _same_value, False),
        "game_of_life": Rule("JSON", lambda text, _: _canonical(_json(text)), _same_json),
        "graph_color": Rule("JSON object", _colours),
        "group_anagrams": Rule("JSON lists of texts", _lists_of_texts),
        "jugs": Rule("JSON list of texts", _texts),
        "knight_swap": Rule("JSON list of texts, or No", _moves_or_no),
        "palindrome_partitioning": Rule("JSON lists of texts", _lists_of_texts),
        # The library evaluates these as Python.
        "binary_matrix": Rule("rows, or a list", None, _rows_of_numbers, False),
        "n_queens": Rule("rows, or a list", None, _board, False),
        "spiral_matrix": Rule("rows, or a list", None, _rows_of_numbers, False),
        "string_insertion": Rule("text, or a list", None, _letters, False),
        "countdown": Rule("formula of the numbers", None, makes_target, False),
        "puzzle24": Rule("formula of the numbers", None, makes_24, False),
        "polynomial_multiplication": Rule("formula, expanded", None, is_product, False),
        "intermediate_integration": Rule(
            "formula",
            None,
            is_antiderivative,
            False,
            lambda entry: "Integral" not in entry["answer"],
        ),
        "simple_integration": Rule("formula", None, is_antiderivative, False),
        # Puzzles with moves, letters and people.
        "cryptarithm": Rule("digits of letters", _letters_to_digits),
        "knights_knaves": Rule("roles", _roles),
        "propositional_logic": Rule("formula of logic", None, is_conclusion, False, has_conclusion),
        "quantum_lock": Rule("buttons", _words_matching("[ABCabc]", separators="→,")),
        "rubiks_cube": Rule(
            "moves",
            _words_matching("[LRDUBFXYZMES]w?'?[1-9]?"),
            is_fair=lambda entry: bool(entry["metadata"]["example_correct_answer"]),
        ),
        "rush_hour": Rule("moves", None, _parked, False),
        "sokoban": Rule("moves", _pushes),
        "tower_of_hanoi": Rule("moves", _lines_matching(_MOVE)),
    }
)
"""All tasks whose scorers have been reviewed; any other task is refused."""
