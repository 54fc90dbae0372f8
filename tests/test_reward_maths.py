"""The maths reward: finding the boxed answer, and saying whether it is the gold one."""

import json
import logging
import signal
import threading
import time
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sortedrl.rewards.maths import math_reward
from sortedrl.rewards.maths.numbers import last_number, numeral
from sortedrl.rewards.maths.reading import (
    boxed_answer,
    bracketed,
    folded,
    parts,
    read_answer,
    sides,
    spelled,
    tidied,
)
from sortedrl.rewards.pool.score import NoScoreError, checked_score
from sortedrl.rewards.tags import conclusion
from sortedrl.types import Prompt

pytest.importorskip("math_verify", reason="needs math-verify: pip install 'sortedrl[maths]'")


def score(gold, response, *, fields=None, **options):
    prompt = Prompt(id=0, fields={"answer": gold, **(fields or {})})
    return math_reward(prompt, response, **options)


def is_right(gold, answer, **fields):
    """Whether the answer in a box is right, through the real reward."""
    return score(gold, rf"So it is \boxed{{{answer}}}.", fields=fields)["correct"] == 1.0


# Laws.

INTEGERS = st.integers(-(10**12), 10**12)
WRITE_INTEGER = {
    "plain": lambda n: f"{n}",
    "thousands": lambda n: f"{n:,}",
    "thin thousands": lambda n: f"{n:,}".replace(",", r",\!"),
    "braced thousands": lambda n: f"{n:,}".replace(",", "{,}"),
    "decimal": lambda n: f"{n}.0",
    "commas and dollars": lambda n: f"{n:,} dollars",
    "square feet": lambda n: rf"{n:,} \text{{ square feet}}",
    "mathematics": lambda n: f"${n}$",
    "assigned": lambda n: f"x = {n}",
    "unit": lambda n: rf"{n}\text{{ cm}}^2",
    "unit in letters": lambda n: f"{n} apples",
    "dollars": lambda n: rf"\${n:,}",
    "degrees": lambda n: rf"{n}^\circ",
    "parentheses": lambda n: f"({n})",
    "in a box": lambda n: rf"\boxed{{ {n} }}",
    "full stop": lambda n: f"{n}.",
    "Unicode minus": lambda n: f"{n}".replace("-", "\u2212"),
}
WITH_UNIT = {"unit", "unit in letters", "commas and dollars", "square feet", "degrees"}
FRACTIONS = st.fractions(-1000, 1000, max_denominator=10**4).filter(
    lambda value: value.denominator > 1
)
WRITE_FRACTION = {
    "frac": lambda a, b: rf"\frac{{{a}}}{{{b}}}",
    "dfrac": lambda a, b: rf"\dfrac{{{7 * a}}}{{{7 * b}}}",
    "sign before": lambda a, b: rf"{'-' if a < 0 else ''}\frac{{{abs(a)}}}{{{b}}}",
    "slash": lambda a, b: f"{a}/{b}",
    "digits": lambda a, b: f"{a / b:.10f}" if abs(a / b) > 1e-3 else f"{a}/{b}",
    "scientific": lambda a, b: rf"{a / b * 1e5:.12f} \times 10^{{-5}}",
}


@given(
    INTEGERS,
    st.sampled_from(sorted(WRITE_INTEGER.keys() - WITH_UNIT)),
    st.sampled_from(sorted(WRITE_INTEGER)),
)
@settings(max_examples=200)
def test_a_whole_number_equals_itself_in_every_notation_and_no_other(number, gold, answer):
    wanted = WRITE_INTEGER[gold](number)
    assert is_right(wanted, WRITE_INTEGER[answer](number))
    assert not is_right(wanted, WRITE_INTEGER[answer](number + 1))


WRITE_UNEVALUATED = {
    "fraction": lambda n: rf"\dfrac{{{3 * n}}}{{3}}",
    "slash": lambda n: f"{2 * n}/2",
    "sum": lambda n: f"{n - 1} + 1",
    "difference": lambda n: f"{n + 7} - 7",
    "product": lambda n: rf"{n} \times 1",
    "dot": lambda n: rf"{n} \cdot 1",
    "power": lambda n: f"({n})^1",
    "root": lambda n: rf"\sqrt[3]{{{n**3}}}",
    "divisor": lambda n: rf"\gcd({n}, {2 * n})",
    "binomial": lambda n: rf"\binom{{{n}}}{{1}}",
    "sum over": lambda n: rf"\sum_{{i=1}}^{{1}} {n}",
    "integral": lambda n: rf"\int_0^1 {n} \, dx",
    "limit": lambda n: rf"\lim_{{x \to 0}} {n}",
    "floor": lambda n: rf"\lfloor {n}.5 \rfloor",
    "bars": lambda n: f"|{n}|",
    "equation": lambda n: f"|x| = {n}",
    "factorial": lambda n: rf"{n} \cdot 1!",
}


@given(INTEGERS, st.sampled_from(sorted(WRITE_UNEVALUATED)))
def test_a_number_that_is_not_worked_out_is_no_answer_to_a_number(number, way):
    assert not is_right(str(number), WRITE_UNEVALUATED[way](number))


@pytest.mark.parametrize(
    "way", sorted(WRITE_UNEVALUATED.keys() - {"equation", "sum over", "limit"})
)
def test_evaluations_may_take_expressions_with_the_right_value(way):
    if way != "integral":
        response = rf"\boxed{{{WRITE_UNEVALUATED[way](6)}}}"
        assert score("6", response, allow_unevaluated=True)["correct"] == 1.0
        assert score("7", response, allow_unevaluated=True)["correct"] == 0.0


NOT_A_UNIT = ["million", "thousand", "i", "x", "n", "k", "!", "!!", "xy", "abc", "pi", "e", "plus"]


@given(st.integers(2, 10**6), st.sampled_from(NOT_A_UNIT), st.sampled_from(["", " ", r"\ "]))
def test_what_changes_a_number_is_no_unit(number, suffix, space):
    assert not is_right(str(number), f"{number}{space}{suffix}")
    assert not is_right(str(number), f"{number}{space}{suffix} 7")


@given(st.integers(1, 99), st.integers(1, 98), st.integers(2, 99))
def test_a_mixed_number_is_not_the_fraction_with_its_digits(whole, over, under):
    over = over % under or 1
    mixed, value = f"{whole} {over}/{under}", whole + Fraction(over, under)
    assert is_right(mixed, rf"{whole}\frac{{{over}}}{{{under}}}")
    assert is_right(mixed, f"{value.numerator}/{value.denominator}")
    assert is_right(mixed, f"{whole}{over}/{under}") is (
        value == Fraction(f"{whole}{over}") / under
    )
    assert not is_right(f"{whole}{over}", f"{whole} {over}")


@given(FRACTIONS, st.sampled_from(sorted(WRITE_FRACTION)))
def test_a_fraction_equals_itself_in_every_notation_and_no_other(value, way):
    gold = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    other = value + Fraction(1, 7)
    assert is_right(gold, WRITE_FRACTION[way](value.numerator, value.denominator))
    assert not is_right(gold, WRITE_FRACTION[way](other.numerator, other.denominator))


@given(st.lists(st.integers(-99, 99), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_a_list_must_be_complete_and_may_be_in_any_order(numbers, chance):
    gold = [str(number) for number in numbers]
    shuffled = chance.sample(gold, len(gold))
    assert is_right(gold, ", ".join(shuffled))
    assert is_right(", ".join(gold), r"\{" + "; ".join(shuffled) + r"\}")
    assert not is_right(gold, ", ".join(shuffled[1:]))
    assert not is_right(gold, ", ".join([*shuffled, "1000"]))
    assert not is_right(gold, ", ".join([*shuffled[1:], "1000"]))


@given(st.lists(st.integers(-99, 99), min_size=2, max_size=4))
def test_a_tuple_must_be_in_order(numbers):
    places = [str(number) for number in numbers]
    gold = f"({', '.join(places)})"
    assert is_right(gold, r"\left( " + r", \; ".join(places) + r" \right)")
    assert is_right(gold, f"({', '.join(reversed(places))})") is (places == places[::-1])


LATEX = (
    r"\frac { } ( ) [ ] ^ _ 9 12 0.5 , ; x n \sqrt \pi \pm + - = \cdot ! \text{ and % $ \left( "
    r"\begin{pmatrix} \end{pmatrix} & \\ \infty \cup \le < \circ \sin | \{ \} \int \sum e i \in : "
    r"\boxed{ \binom / ' \prime ** ~ \! \phantom 五 ½ 😀"
)
PIECES = st.sampled_from(LATEX.split())
GARBAGE = st.lists(PIECES, min_size=1, max_size=12).map("".join) | st.text(max_size=40)


@given(
    GARBAGE,
    st.sampled_from(["5", r"\frac{1}{2}", "x+1", "(1,2)", r"\text{east}", "1,2", "x=5", "[0,1)"]),
)
@example("\x00", "5")
@example("\ud800", "5")
def test_no_answer_whatever_makes_the_reward_raise(garbage, gold):
    for response in (garbage, rf"\boxed{{{garbage}}}", rf"<think></think>\boxed {garbage}"):
        parts_given = score(gold, response)
        assert checked_score(parts_given).reward in (0.0, 1.0)
        assert parts_given["reward"] == parts_given["correct"] <= parts_given["answered"]


@given(GARBAGE.filter(tidied))
@settings(max_examples=100)
def test_any_gold_is_met_by_its_own_text(gold):
    if boxed_answer(rf"\boxed{{{gold}}}") == gold.strip():
        assert is_right(gold, gold)


@given(st.text(alphabet="\\boxed{} 5a", max_size=60))
def test_what_was_found_in_a_box_stands_in_the_response(text):
    found = boxed_answer(text)
    assert found is None or found in text


@given(st.integers(0, 50), st.integers(0, 50))
def test_a_box_counts_only_if_its_braces_balance(opening, closing):
    text = r"\boxed{" + "{" * opening + "5" + "}" * closing
    assert (boxed_answer(text) is not None) == (closing > opening)


# The box.


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{ \frac{1}{2} } and more", r"\frac{1}{2}"),
        (r"first \boxed{3}, no: \boxed{4}", "4"),
        (r"\boxed{3} and then \boxed{4", "3"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{\boxed{}}", ""),
        (r"\boxed{}", ""),
        (r"\boxed{x=\boxed{5}}", r"x=\boxed{5}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a\\{b}}", r"a\\{b}"),
        (r"\\\boxed{5}", "5"),
        (r"\\boxed{5}", "5"),
        (r"\fbox{2}", "2"),
        (r"\framebox{204}", "204"),
        (r"\boxed 5.", "5"),
        (r"\boxed 1,080 metres", "1,080"),
        (r"\boxed -3/4$", "-3/4"),
        (r"\boxed x$", "x"),
        (r"so I use \boxed notation", None),
        (r"\boxedfoo{5}", None),
        (r"\boxed{5", None),
        ("5", None),
        ("", None),
        (r"} \boxed{2}}", "2"),
        (r"an open { and \boxed{2}", "2"),
        (r"<think>\boxed{1}</think> It is \boxed{2}.", "2"),
        (r"<think>\boxed{1}</think> It is 2.", None),
        (r"\boxed{1}</think>", None),
        (r"<think>\boxed{1}", None),
    ],
)
def test_the_last_complete_box_counts(response, answer):
    assert boxed_answer(conclusion(response)) == answer


def test_thoughts_that_began_in_the_prompt_and_never_end_hold_no_answer():
    prompt = {"prompt_end": "<think>"}
    assert score("1", r"Hm, \boxed{1}?", fields=prompt)["answered"] == 0.0
    assert score("2", r"Hm, \boxed{1}?</think> \boxed{2}", fields=prompt)["correct"] == 1.0


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 50_000,
        r"\boxed{" * 50_000 + "5" + "}" * 50_000,
        r"\boxed{ " * 50_000 + "5" + " }" * 50_000,
        "{" * 300_000,
        r"\boxed " * 50_000,
    ],
)
def test_finding_a_box_takes_linear_time(text):
    began = time.process_time()
    boxed_answer(text)
    assert time.process_time() - began < 10


# Text and numbers.


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1,080", 1080),
        (r"11,\! 111,\! 111,\! 100", 11111111100),
        (r"10\,080", 10080),
        ("1{,}008{,}016", 1008016),
        (r"\$32,\!348", 32348),
        (r"\frac 59", Fraction(5, 9)),
        (r"\frac{270}7\text{ degrees}", Fraction(270, 7)),
        (r"1\frac{4}{5}", Fraction(9, 5)),
        (r"137 \frac{1}{2}", Fraction(275, 2)),
        ("1 3/4", Fraction(7, 4)),
        ("13/4", Fraction(13, 4)),
        ("-(1/3)", Fraction(-1, 3)),
        ("2½", Fraction(5, 2)),
        (".5", Fraction(1, 2)),
        ("7 \\times 10^{37}\n", 7 * 10**37),
        ("4.5e33", 45 * 10**32),
        ("10^{-3}", Fraction(1, 1000)),
        (r"\approx 8.24 \text{ mph}", Fraction(206, 25)),
        (r"15000 \text{ kcal m}^{-2} \text{yr}^{-1}", 15000),
        (r"1950^\circ C", 1950),
        (r"0.003^{\prime \prime}", Fraction(3, 1000)),
        (r"\textbf{(073)}", 73),
        ("6th", 6),
        ("110^3", None),
        (r"2\mathrm{i}", None),
        ("5x", None),
        ("1/0", None),
        ("1e999", None),
        ("9" * 500, None),
        ("1,2", None),
        ("", None),
    ],
)
def test_plain_numbers_are_read_exactly(written, value):
    found = numeral(tidied(written))
    assert (None if found is None else found.value) == value


@pytest.mark.parametrize(
    ("written", "pieces"),
    [
        (r"2, 3, \text{ and } 4", ["2", "3", "4"]),
        (r"6, 8\text{, and }10", ["6", "8", "10"]),
        (r"3 \text{ or } 4", ["3", "4"]),
        ("$69$,$84$", ["69", "84"]),
        (r"1 \pm \sqrt{19}", [r"1 + \sqrt{19}", r"1 - \sqrt{19}"]),
        (r"\left\{1, (2, 3)\right\}", ["1", "(2, 3)"]),
        (r"\text{A, D, F}", [r"\text{A}", r"\text{D}", r"\text{F}"]),
        (r"(0,9) \cup (9,36)", [r"(0,9) \cup (9,36)"]),
        (r"\{1\} \cup \{2\}", [r"\{1\} \cup \{2\}"]),
        ("f(x, y), g(x, y)", ["f(x, y)", "g(x, y)"]),
    ],
)
def test_the_parts_of_an_answer_stand_outside_all_brackets(written, pieces):
    assert parts(tidied(written)) == pieces


def test_only_tuples_and_intervals_are_bracketed():
    assert bracketed("(1, [2, 3])") == ("()", ["1", "[2, 3]"])
    assert bracketed("[0, 1)") == ("[)", ["0", "1"])
    for other in ("(1)", "(1)(2, 3)", "1, 2", "(a, b) + (c, d)", "("):
        assert bracketed(other) is None


def test_layout_does_not_matter():
    tidy = tidied(r"$\displaystyle \left( 3 , \, \tfrac{\pi}{2} \right) .$")
    assert folded(tidy) == folded(tidied(r"(3,\frac{\pi}{2})"))


# What is equal, and what is not.

EQUAL = [
    ("5", "x=5"),
    ("x=5", "5"),
    ("K = 8", "8"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac13", "0.33333"),
    (r"\frac13", "0.3333"),
    (r"\frac23", "0.6666"),
    ("0.6666666667", r"\frac23"),
    (r"17\%", "17"),
    (r"17\%", "0.17"),
    ("17", r"17 \%"),
    ("0.17", r"17\%"),
    (r"90^\circ", "90"),
    ("90", r"90^{\circ}"),
    ("72", r"\$72.00"),
    ("9.6", r"\lambda = 9.6 \text{ \AA}"),
    ("1000", r"1\,000"),
    (r"\text{Friday}", "friday"),
    ("Friday", r"\text{Friday}."),
    (r"\text{(C)}", "C"),
    ("C", r"\textbf{(C)}"),
    ("C", r"\textbf{(C)}\ 12"),
    ("12", r"\textbf{(C) } 12"),
    ("3:30 p.m.", r"3{:}30 \text{ PM}"),
    ("They are equal", r"\text{they are equal}"),
    (r"-2 \text{ or } -12", "-12, -2"),
    (r"3 \pm 2\sqrt{2}", r"3 - 2\sqrt{2}, 3 + \sqrt{8}"),
    (r"\{1 \pm \sqrt{5}, -2\}", r"-2, 1 - \sqrt5, 1 + \sqrt5"),
    (r"\text{A, B}", "B, A"),
    ("(3, 4)", "x = 3, y = 4"),
    ("3, 4", "(3, 4)"),
    (r"x \in [-2,7]", "[-2,7]"),
    (r"(-\infty, 3)", r"x \in (-\infty, 3)"),
    ("[2,5)", r"2 \le x < 5"),
    (r"(-\infty, 0) \cup \{1\}.", r"\{1\} \cup (-\infty,0)"),
    ("52_8", "52"),
    ("4210_{5}", "4210_5"),
    ("2x - y + 3z + 8 = 0", "4x - 2y + 6z = -16"),
    ("y = 2x + 3", "3 + 2x"),
    ("f(x)=2 x", "2x"),
    (r"\binom{2n}{n}", r"\frac{(2n)!}{n! \, n!}"),
    (r"\sqrt{12}", r"2\sqrt{3}"),
    (r"12\sqrt{13}\text{ feet}", r"12\sqrt{13}"),
    (r"\tan 15^\circ", r"2 - \sqrt{3}"),
    (r"\frac{e^{2it}}{2+2i} + Ce^{-2t}", r"\frac{e^{2 i t}}{(2+2 i)}+C e^{-2 t}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix}1\\[2pt]2\end{bmatrix}"),
    (r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}", r"\frac{E_1 + 2 E_2}{3}"),
    ("n", r"\frac{2n}{2}"),
    ("2^{1009}", r"2 \cdot 4^{504}"),
    (r"\sum_{k=1}^{n} k", r"\sum_{j=1}^{n} j"),
    ("0.56 = 56\\%", "0.56"),
    (r"\$\dfrac23 \approx \$0.67", r"\frac{2}{3}"),
    ("5", "**5**"),
    ("5", "5\u200b"),
]
UNEQUAL = [
    ("3", r"3 \text{ or } 4"),
    ("3", "3, 3"),
    ("5", "4"),
    ("2", "1.99999"),
    ("885000", "885000.5"),
    ("885000.5", "885000"),
    ("10000.0", "10001"),
    ("1429.5", "1429.6"),
    ("41585", "41586"),
    (r"\frac13", "0.333"),
    ("0", "1e-30"),
    ("3.61e-10", "2e-10"),
    ("3.61e-10", "2^{-40}"),
    ("17", "0.17"),
    ("(1, 2)", "(2, 1)"),
    ("(1, 2)", "[1, 2)"),
    ("(1, 2)", "(1, 2, 3)"),
    ("1, 2, 3", "1, 2"),
    ("52_8", "52_9"),
    ("2ab", "2"),
    ("2ab", "2ac"),
    ("2", "2 pi"),
    ("CD", "DC"),
    (r"\text{even}", "odd"),
    (r"\text{Friday}", "5"),
    ("C", "B"),
    ("x", "y"),
    ("x+1", "x+2"),
    ("55", r"\sum_{i=1}^{10} i"),
    ("5", "5!"),
    ("5", r"\text{five or so}"),
    ("5", r"\frac{}{}"),
    ("5", "}{"),
    ("5", "五"),
    ("5", "(" * 300),
]


# For each gold, answers that are right (+) and answers that are wrong (-).
TABLE_TEXT = r"""
5
  + 5 ;; +5 ;; (5) ;; 5.0 ;; 5. ;; 05 ;; $5$ ;; \$5 ;; 5\$ ;; \$ 5.00 ;; USD 5 ;; 5 USD
  + 5 dollars ;; 5\text{ dollars} ;; 5 cm ;; 5cm ;; 5days ;; 5 cm^2 ;; 5\ \text{cm}^2
  + 5 \mathrm{~cm}^{2} ;; 5\,\mathrm{m/s} ;; 5 \text{ m/s}^2 ;; 5 m ;; 5 km/h ;; 5 square feet
  + 5 feet squared ;; 5 apples ;; 5 (apples) ;; 5 red apples ;; 5 cups of flour ;; 5 times
  + 5 times as many ;; 5 units ;; 5 pens ;; 5 mph ;; 5 t-shirts ;; 5 DVDs ;; 5 DS games
  + 5 third graders ;; 5 CDs ;; 5 p.m. ;; 5 eggs/day
  + 5 hours per day ;; 5\text{ hours} ;; 5^\circ ;; 5^{\circ} ;; 5^\circ C ;; 5 degrees ;; 5\%
  + 5 percent ;; \text{5} ;; \text{5 apples} ;; \textbf{5} ;; \mathbf{5} ;; **5** ;; {5}
  + {{5}} ;; \{5\} ;; five ;; \text{five} ;; x=5 ;; x = 5 ;; 5=x ;; 5=5 ;; f(x)=5 ;; f(3) = 5
  + x_1 = 5 ;; \theta = 5 ;; AB = 5 ;; \angle ABC = 5^\circ ;; \text{Area} = 5 ;; Total cost = 5
  + 2+3=5 ;; 10/2 = 5 ;; \sqrt{25}=5 ;; x = 2+3 = 5 ;; x = \frac{10}{2} = 5 ;; x=5.0=5
  + \approx 5 ;; x \approx 5 ;; The answer is 5 ;; Answer: 5 ;; \text{Total: } 5 ;; 5e0
  + 5 \times 10^0 ;; \boxed{5} ;; \left(5\right) ;; 5.000 ;; 5, ;; 5th ;; (C) 5
  + \textbf{(C)}\ 5 ;; \text{(C) }5
  - 4 ;; -5 ;; 5.5 ;; 5.0001 ;; 55 ;; 5 5 ;; 0 5 ;; 5,5 ;; 5, 6 ;; 5 or 6 ;; 5 \text{ or } 6
  - 5 and 6 ;; 4 or 5 ;; \pm 5 ;; 5 (not 6) ;; 5 not 6 ;; not 5 ;; x is not 5 ;; 5 million
  - 5 thousand ;; 5 hundred ;; 5 dozen ;; 5k ;; 5M ;; 5 k ;; 5! ;; 5!! ;; 5i ;; 5 i
  - 5\mathrm{i} ;; 5\text{i} ;; 5x ;; 5 x ;; 5xy ;; 5abcd ;; 5 xyz ;; 5 AB ;; 5 DS ;; 5xxxx
  - 5 abc ;; 5 xy
  - 5 n ;; 5e3 ;; 5e ;; 5 e ;; 5 pi ;; 5\pi ;; 5 \cdot 10^3 ;; 5 \times 10 ;; 0x5 ;; 2+3 ;; 1+4
  - 10-5 ;; 5+0 ;; 5 \cdot 1 ;; 5*1 ;; 5^1 ;; 10/2 ;; \frac{10}{2} ;; \frac{5}{1.0} ;; 15 \div 3
  - \sqrt{25} ;; \sqrt[3]{125} ;; |-5| ;; |5| ;; \log_2 32 ;; \lfloor 5.5\rfloor
  - \lceil 4.2 \rceil ;; \binom{5}{1} ;; \gcd(10,15) ;; gcd(10,15) ;; \max(4,5)
  - \sum_{i=1}^{5} 1 ;; \int_0^5 dx ;; \lim_{x \to 5} x ;; 12 \bmod 7 ;; 5 \pmod 7
  - \sin 90^\circ + 4 ;; 2^2+1 ;; 5... ;; 5\ldots ;; V ;; |x|=5 ;; x^2=5 ;; 2x=5 ;; x+y=5 ;; x>5
  - x \ge 5 ;; x \neq 5 ;; \neq 5 ;; 4=5 ;; 5=4 ;; 5=6=5 ;; x=5=6 ;; 5<6 ;; [5] ;; (5, 5) ;; 5:1
  - 5/ ;; /5 ;; 5- ;; --5 ;; -(-5) ;; +-5 ;; 5_8 ;; 5^2 ;; 5^\circ 30' ;; 5 squared ;; 5 cubed
  - 5 and a half ;; 5 halves ;; 5 thirds ;; 1 fifth ;; 5 factorial ;; 5 over 2 ;; 5 plus one
  - 5 or so ;; five or so ;; five or six ;; 5 hours 30 minutes ;; 5 cm 2 mm ;; 5 minus ;; NaN
  - nan ;; inf ;; \infty ;; \text{} ;; }{ ;; \frac{}{} ;; 5\frac{}{} ;; 5 a ;; 5 to 6 ;; 5-6
  - 5--6 ;; 5\frac12 ;; 5 1/2 ;; 5 0/2 ;; ? ;; 5? ;; (B) or (C) ;; at least 5 ;; 5 or more
  - \boxed{5}\boxed{6}
12
  + 12 ;; 12\text{ cm} ;; 1 dozen ;; 12.00
  - 1 2 ;; 1, 2 ;; 1,2 ;; 12 34 ;; 1{2 ;; 1\,2 ;; 4!/2 ;; 3 \cdot 4 ;; 144^{1/2} ;; 6 + 6
  - 3!+3! ;; \frac{24}{2} ;; 24/2
1000
  + 1000 ;; 1,000 ;; 1 000 ;; 1\,000 ;; 1,\!000 ;; 1{,}000 ;; \$1,000 ;; 1,000 dollars
  + 1,000.00 ;; 1 thousand ;; 1e3 ;; 10^3 ;; 10^{3} ;; 1 \times 10^3 ;; 1,000\text{ m}
  + 1 000 m
  - 1.000 ;; 1,00 ;; 1,0,0,0 ;; 1, 000 ;; 1,0000 ;; 1.000,0 ;; 100 0 ;; 1 0 0 0 ;; 10 \times 100
  - 1k ;; 1 K ;; 10^{2} ;; 10^4 ;; (1,000)x
1080
  + 1,080 square feet ;; 1,080 \text{ square feet} ;; 1{,}080\text{ ft}^2 ;; 1080 sq ft
  + 1080 square feet
  - 1,08 ;; 1,080,000 ;; 1,080 and 5 feet ;; 1,080, 5 square feet
5000000
  + 5 million ;; 5 \text{ million} ;; \$5 million ;; \$5\text{ million dollars} ;; 5,000,000
  + 5 \times 10^6 ;; 5e6
  - 5 ;; 5 billion ;; 5 millionths ;; 5 m
\frac{3}{2}
  + 1.5 ;; 3/2 ;; \frac32 ;; \dfrac{3}{2} ;; 1\frac12 ;; 1 \frac{1}{2} ;; 1 1/2 ;; 6/4
  + \frac{-3}{-2} ;; 150\% ;; \frac{3}{2}\text{ cm} ;; 3/2 cm ;; 1.50
  - 11/2 ;; 1.1/2 ;; 1+1/2 ;; 1+\frac12 ;; 2/3 ;; -3/2 ;; 1 1 ;; 1 \cdot \frac{3}{2} ;; 1 3/2
  - \frac{1.5}{1} ;; 3/2/1 ;; 3 ;; 1 -1/2 ;; \frac{\sqrt 9}{2} ;; 3 2 ;; 3:2
1 1/2
  + 1.5 ;; 3/2 ;; 1\frac{1}{2}
  - 11/2 ;; 5.5 ;; 1 1 / 3 ;; 1/2
11/2
  + 5.5 ;; 5 1/2 ;; 5\frac12 ;; \frac{11}{2} ;; 22/4
  - 1 1/2 ;; 1.5 ;; 1\frac12 ;; 11 2
-1 1/2
  + -1.5 ;; -3/2 ;; -1\frac12 ;; -\frac{3}{2} ;; \frac{-3}{2} ;; \frac{3}{-2} ;; -(3/2)
  + (-3/2)
  - -1/2 ;; 1 1/2 ;; -11/2 ;; -0.5
3 4/5
  + 3.8 ;; 19/5 ;; 3\frac45
  - 34/5 ;; 6.8 ;; 3 5/4 ;; 3, 4/5
\frac13
  + 1/3 ;; 0.\overline{3} ;; 0.33333 ;; 0.3333 ;; 0.33333\ldots ;; 2/6 ;; 33.3333\%
  - 0.33 ;; 0.3 ;; 0.34 ;; 1 3 ;; 0.\overline{4} ;; \overline{3}
0.05
  + 5\% ;; 0.05 ;; .05 ;; 1/20 ;; \frac{1}{20} ;; 5e-2 ;; 5 \times 10^{-2} ;; 5 per cent
  - 5 ;; 0.5 ;; 50\% ;; 5^{-2}
5\%
  + 5 ;; 0.05 ;; 5 \% ;; 5 percent ;; 5.0\% ;; x = 5\%
  - 500 ;; 0.5 ;; 50\% ;; 5!
15\text{ cm}
  + 15 ;; 15 cm ;; 15\text{ centimeters} ;; 15 centimetre
  - 15 m ;; 15 km ;; 15\text{ inches} ;; 1.5
90^\circ
  + 90 ;; 90 degrees ;; 90^{\circ} ;; \angle A = 90^\circ ;; 90\degree
  - 90 radians ;; 90^\circ 30^\circ ;; \frac{\pi}{2} ;; 45^\circ + 45^\circ ;; 2 \cdot 45^\circ
-7
  + -7 ;; - 7 ;; x=-7 ;; (-7)
  - 7 ;; --7 ;; \pm 7 ;; -(-7) ;; 0-7 ;; -7! ;; 7-
x=7
  + 7 ;; x=7 ;; 7=x ;; x = 7.0
  - y=7 ;; |x|=7 ;; x=-7 ;; x=7 or x=-7 ;; x=\pm 7 ;; x>7 ;; 2x=14
y=-1
  + y=-1 ;; -1 ;; y = -1.0
  - x=-1 ;; y=1
83810205
  + 83810205 ;; 83,810,205 ;; 12345 \times 6789 = 83810205
  - 12345 \times 6789 ;; 12345 \cdot 6789 ;; 12345*6789 ;; 12345(6789) ;; 6789 + 83803416
120
  + 120 ;; 5! = 120
  - 5! ;; \binom{16}{2} ;; \frac{240}{2} ;; 2 \cdot 60 ;; \prod_{k=1}^5 k ;; P(6,3) ;; \Gamma(6)
  - 1*2*3*4*5
2\sqrt{3}
  + \sqrt{12} ;; \sqrt{3} \cdot 2 ;; \frac{6}{\sqrt{3}} ;; x = 2\sqrt{3} ;; 2\sqrt3\text{ cm}
  + 2 \cdot 3^{1/2}
  - 3.46 ;; \tan 60^\circ \cdot 2 ;; |x|=2\sqrt{3} ;; x^2 = 2\sqrt{3} ;; \sqrt{4!/2}
  - \pm 2\sqrt{3} ;; 2\sqrt{3}, 1
16\pi
  + \pi \cdot 16 ;; 16 \pi \text{ cm}^2 ;; A = 16\pi
  - \sqrt{256}\pi ;; \int_0^{16} \pi \, dx ;; 16 ;; 50.27 ;; 16p
3+4i
  + 4i+3 ;; z = 3+4i ;; 3 + 4\mathrm{i}
  - 7 ;; 3-4i ;; 3+4 ;; |z| = 3+4i ;; 3,4
x^2+3x+2
  + (x+1)(x+2) ;; 2+3x+x^2 ;; (x+1)(x+2) = x^2+3x+2 ;; y = x^2+3x+2
  - x^2+3x+1 ;; \int (2x+3) dx + 2 ;; x^2+3x+2=0 ;; z = x^2 + 1
B
  + B ;; (B) ;; \text{(B)} ;; \textbf{(B)} ;; B) ;; B. ;; b ;; (B) 12 ;; \textbf{(B) } 12
  + B: 12 ;; \text{B} ;; \mathrm{(B)}
  - C ;; (B) or (C) ;; B or C ;; B and C ;; (B), (C) ;; (B)(C) ;; B, C ;; BC ;; B C ;; not B
  - (B) not (C) ;; A or B ;; (A) 12, (B) 13 ;; B or (C) ;; \text{B or C} ;; ABCDE
  - (B) 12 (C) 13 ;; B/C
\text{A, B}
  + A and B ;; (A), (B) ;; B, A ;; \text{A and B} ;; A, B ;; A or B
  - A ;; B ;; AB ;; A, B, C ;; A, A
\text{east}
  + east ;; East ;; \text{East}.
  - west ;; east or west ;; 5 ;; north east
\emptyset
  + \emptyset ;; \varnothing ;; \{\} ;; \{ \} ;; \phi ;; \text{empty set} ;; \text{no solution}
  + \left\{\right\}
  - 0 ;; \{0\} ;; \{\emptyset\} ;; () ;; x ;; 1
\{1,2\}
  + 1,2 ;; 2,1 ;; \{2, 1\} ;; 1 and 2 ;; 1; 2 ;; x \in \{1, 2\} ;; x=1, x=2 ;; x = 1 or x = 2
  - 1 ;; 12 ;; 1,2,3 ;; 1,1 ;; [1,2) ;; 1 2 ;; 1, 2, 2 ;; \{1\}
-2, 2
  + \pm 2 ;; 2,-2 ;; x = \pm 2 ;; \{-2, 2\} ;; 2 and -2
  - 2 ;; -2 ;; \pm 3 ;; |x|=2 ;; -2,3 ;; \pm 2, 2
(1, 2)
  + (1,2) ;; \left(1, 2\right) ;; x=1, y=2 ;; (1.0, 2)
  - (2,1) ;; [1,2] ;; (1,2] ;; (1,3) ;; 12 ;; (1,2),(3,4) ;; (1+0, 2) ;; (\sqrt{1}, 2)
  - (1, 2, 2)
[2,5)
  + [2,5) ;; 2 \le x < 5 ;; x \in [2, 5)
  - (2,5) ;; [2,5] ;; (2,5] ;; 2,5 ;; 2 < x < 5 ;; [2,6)
(2,251,252)
  + (2, 251, 252)
  - 2251252 ;; (2,252,251)
7 \times 10^{37}
  + 7e37 ;; 7.0 \cdot 10^{37} ;; 7 x 10^37 ;; 70 \times 10^{36}
  - 7 ;; 7 \times 10^{36} ;; 10^{37} ;; 7^{37}
52_8
  + 52_8 ;; 52_{8} ;; 52
  - 52_9 ;; 42 ;; 5 2 ;; 52.0
\mbox{four}
  + four ;; 4 ;; Four
  - five ;; 5 ;; 2+2
3:30 p.m.
  + 3:30 PM ;; 3{:}30 \text{ p.m.}
  - 3:30 a.m. ;; 3:31 p.m. ;; 330
0
  + 0 ;; 0.0 ;; zero ;; x=0
  - 1e-30 ;; 5-5 ;; \sin 0 ;; - ;; 0! ;; 0x ;; \emptyset ;; O
100
  + 100 ;; 100.0 ;; 1e2 ;; 1 hundred
  - 10 \times 10 ;; 10^2 \cdot 1 ;; 5050/50.5 ;; 99+1 ;; 1 00 ;; 9^{9^{9}}
"""
UNICODE = [
    ("5", "5\u20ac", True),
    ("5", "5\xb0", True),
    ("5", "\u22485", True),
    ("5", "\uff15", True),
    ("5", "5\u2026", False),
    ("5", "\u4e94", False),
    ("5", "\u0665", False),
    ("1000", "\uff11\uff10\uff10\uff10", True),
    ("\\frac{3}{2}", "1\xbd", True),
    ("-7", "\u22127", True),
    ("83810205", "12345 \xd7 6789", False),
    ("\\emptyset", "\u2205", True),
]


def table():
    """Gold, answer and verdict of every line."""
    gold, cases = "", {}
    for line in TABLE_TEXT.strip().splitlines():
        if line.startswith("  "):
            for answer in line[4:].split(";;"):
                cases.setdefault(gold, []).append((answer.strip(), line[2] == "+"))
        else:
            gold = line
    for gold, answer, verdict in UNICODE:
        cases.setdefault(gold, []).append((answer, verdict))
    return cases


TABLE = table()


@pytest.mark.parametrize("gold", TABLE)
def test_every_answer_of_the_table_gets_its_verdict(gold):
    found = [(answer, is_right(gold, answer)) for answer, _ in TABLE[gold]]
    assert [case for case in found if case not in TABLE[gold]] == []


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_the_same_answer_in_other_words_is_right(gold, answer):
    assert is_right(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), UNEQUAL)
def test_another_answer_is_wrong(gold, answer):
    assert not is_right(gold, answer)


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^9}}",
        "9^{(9)^{9}}",
        "(9^{9999})^{9999}",
        "((9^{999})^{999})^{999}",
        "((x+1)^{999})^{999}",
        "99999999!",
        "(9!)!",
        r"\binom{1000000}{500000}",
        r"\prod_{n=1}^{1000000} n",
        r"\int_0^1 \sin(x^x) \, dx",
        "9" * 10_000,
        "x" * 10_000,
        r"\frac{" * 200 + "1",
        "(" * 1500,
        "1+" * 900 + "1",
        ", ".join(["1"] * 600),
    ],
)
def test_what_would_take_for_ever_is_wrong_at_once(answer):
    began = time.process_time()
    assert not is_right("5", answer)
    assert not is_right(["5", "6"], answer)
    assert time.process_time() - began < 10


SEED_TEXT = r"""
30^\circ ;; { ;; \frac ;; ( ;; , ;; \text{ ;; 7 ;; \boxed{ ;; - ;; ^ ;; \left( ;; [ ;; \{ ;; }
;; () ;; 1, ;; 1,000, ;; ' ;; . ;; \ ;; |x| ;; = ;; x= ;; _ ;; x_{ ;; ^{ ;; ! ;; % ;; \pm ;; \sqrt{
;; \frac{ ;; \frac{1}{2} ;; 1+ ;; ab ;; a- ;; (A) ;; \in ;; \mathrm{ ;; cm^2 ;; / ;; 1/ ;; 0.
;; 10^ ;; \prime ;; ^\prime ;; \, ;; ,\! ;; 9^{ ;; \sum ;; e5 ;; <x ;; x!
"""
SEEDS = [seed.strip() for seed in SEED_TEXT.split(";;")]
SEEDS += [" ", "a ", "1 ", "cm ", "million ", "and ", "or ", "\n", "\t", "\u200b", "\u00bd"]


def seconds_of(function, text):
    spent = []
    for _ in range(3):
        began = time.process_time()
        function(text)
        spent.append(time.process_time() - began)
    return min(spent)


@pytest.mark.parametrize(
    "function",
    [tidied, folded, spelled, parts, sides, numeral, bracketed, read_answer, last_number],
)
def test_reading_takes_time_in_proportion_to_the_text(function):
    for seed in SEEDS:
        short, long = (seed * (length // len(seed)) for length in (2_000, 16_000))
        assert seconds_of(function, long) < 20 * seconds_of(function, short) + 0.05, seed


@pytest.mark.parametrize(
    ("gold", "lengths"),
    [
        ("5", (12, 100, 400, 1_900)),
        (r"\text{B}", (12, 400)),
        (["1", "2"], (12, 400)),
        ("x+1", (12, 60)),
    ],
)
def test_no_repetition_makes_an_answer_right_or_slow(gold, lengths):
    for seed in SEEDS:
        for length in lengths:
            text = seed * max(2, length // len(seed))
            answer = text + "y" + "}" * text.count("{")
            began = time.process_time()
            assert score(gold, rf"\boxed{{{answer}}}")["correct"] == 0.0, answer
            assert time.process_time() - began < 20, answer


def test_an_answer_that_runs_out_of_time_is_wrong_and_says_so():
    before = signal.getsignal(signal.SIGALRM)
    response = r"\boxed{(x+1)^3 - x^3 - 3x^2 - 2x}"
    given = score("x+1", response, wrong=-1.0, time_limit_seconds=0.0005)
    assert given == {"reward": -1.0, "correct": 0.0, "answered": 1.0, "timed_out": 1.0}
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before
    assert score("x+1", response)["correct"] == 1.0


# Several boxes, and the question.


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{1}, \boxed{2}",
        r"$x = \boxed{2}$ or $x = \boxed{1}$.",
        r"The first is $\boxed{1}$. The second is $\boxed{2}$.",
        "\\boxed{1}\n\n\\boxed{2}",
        r"So \boxed{1} and \boxed{2}, that is, \boxed{1} and \boxed{2}.",
        r"First \boxed{1}. So it is \boxed{1, 2}",
    ],
)
def test_the_parts_of_a_list_may_stand_in_several_boxes(response):
    for gold in ("1, 2", ["1", "2"], r"\{1,2\}"):
        assert score(gold, response)["correct"] == 1.0
    assert score(["1", "2", "3"], response)["correct"] == 0.0
    assert score(["1", "3"], response)["correct"] == 0.0


def test_boxes_in_a_list_are_no_way_to_guess():
    for response in (
        r"\boxed{4} or \boxed{5}",
        r"\boxed{4}, \boxed{5}",
        r"\boxed{4} and \boxed{5}",
    ):
        assert score("5", response)["correct"] == 0.0
        assert score("4", response)["correct"] == 0.0
    assert score("5", r"\boxed{5}, \boxed{5}")["correct"] == 1.0
    both = r"It is \boxed{15\frac{39}{40}}, or $\boxed{\frac{639}{40}}$ inches."
    assert score(r"\frac{639}{40}", both)["correct"] == 1.0
    assert score("5", r"\boxed{4}? No, it is \boxed{5}")["correct"] == 1.0


@pytest.mark.parametrize(
    ("question", "gold", "answer"),
    [
        (r"Simplify $\frac{84}{144}$.", r"\frac{7}{12}", r"\frac{84}{144}"),
        (r"Simplify $\sqrt{45}$.", r"3\sqrt{5}", r"\sqrt{45}"),
        ("Expand $(x+2)(x+5)$.", "x^2+7x+10", "(x+2)(x+5)"),
        ("Write 0.75 as a fraction.", r"\frac{3}{4}", "0.75"),
        ("What is $10^3$?", "1000", "10^3"),
        ("Factor $x^2 - 1$ completely.", "(x-1)(x+1)", "x^2-1"),
    ],
)
def test_an_expression_copied_from_the_question_is_no_answer(question, gold, answer):
    messages = [{"role": "user", "content": question}]
    assert not is_right(gold, answer, prompt=question)
    assert not is_right(gold, answer, prompt=messages)
    assert is_right(gold, answer)
    assert is_right(gold, gold, prompt=f"{question} Is it ${gold}$?")
    fields = {"prompt": question}
    given = score(gold, rf"\boxed{{{answer}}}", fields=fields, allow_unevaluated=True)
    assert given["correct"] == 1.0


def test_a_sum_of_letters_is_a_name_only_where_it_is_asked_for():
    assert is_right("33", "m+n = 33", prompt="It is $m/n$ in lowest terms. Find $m+n$.")
    assert not is_right("33", "m+n = 33")
    assert not is_right("33", "m+n = 33", prompt="Let $m+n = 33$. Find $m$.")


def test_a_measured_gold_is_met_by_a_rounded_number():
    assert is_right("671", "671.02", is_measured=True)
    assert is_right("671.02", "671.0", is_measured=True)
    assert not is_right("671", "671.02")
    assert not is_right("671", "672", is_measured=True)
    assert is_right(r"4.4677 \times 10^{14}", r"4.4677 \cdot 10^{14} \text{ Hz}", is_measured=True)


def test_an_error_that_is_allowed_is_allowed():
    assert is_right("4.2", "4.16", error=0.1)
    assert not is_right("4.2", "4.16")


def test_any_of_several_golds_will_do():
    assert is_right("0.01", "0.02", alternatives=["0.02"])
    assert not is_right("0.01", "0.03", alternatives=["0.02"])
    assert is_right("x", "2, 1", alternatives=[["1", "2"]])


# The reward.


def test_right_wrong_and_no_answer_have_their_rewards():
    options = {"right": 2.0, "wrong": -1.0, "no_answer": -0.5}
    right = score("5", r"\boxed{5}", **options)
    assert right == {"reward": 2.0, "correct": 1.0, "answered": 1.0}
    wrong = score("5", r"\boxed{6}", **options)
    assert wrong == {"reward": -1.0, "correct": 0.0, "answered": 1.0}
    for response in ("5", r"\boxed{5", r"\boxed{}", r"\boxed{\boxed{}}"):
        none = score("5", response, **options)
        assert none == {"reward": -0.5, "correct": 0.0, "answered": 0.0}


def test_only_the_last_box_counts():
    assert score("4", r"\boxed{3}, or rather \boxed{4}")["correct"] == 1.0
    assert score("3", r"\boxed{3}, or rather \boxed{4}")["correct"] == 0.0


def test_a_box_in_the_thoughts_is_no_answer():
    assert score("5", r"<think>\boxed{5}</think> So it is five.")["answered"] == 0.0
    assert score("5", r"\boxed{5}</think> So: five.", after_thoughts=False)["correct"] == 1.0
    assert score("5", r"Well, \boxed{5}", fields={"prompt_end": "<think>"})["answered"] == 0.0


@pytest.mark.parametrize("gold", [72, 72.0, "72", ["72"]])
def test_a_gold_may_be_text_a_number_or_a_list(gold):
    assert is_right(gold, "72")


@pytest.mark.parametrize(
    "gold", [None, "", " . ", [], [""], True, {"a": 1}, float("nan"), float("inf")]
)
def test_a_gold_that_is_none_is_refused_aloud(gold):
    with pytest.raises(NoScoreError, match="gold answer"):
        score(gold, r"\boxed{5}")


def test_a_row_without_a_gold_is_refused_aloud():
    with pytest.raises(NoScoreError, match="field `answer`"):
        math_reward(Prompt(id=0, fields={"question": "?"}), r"\boxed{5}")


@pytest.mark.parametrize(
    "fields", [{"alternatives": "5"}, {"error": "small"}, {"error": float("nan")}]
)
def test_fields_of_the_wrong_kind_are_refused_aloud(fields):
    with pytest.raises(NoScoreError, match=next(iter(fields))):
        score("5", r"\boxed{4}", fields=fields)


def test_a_gold_that_cannot_be_read_is_seen():
    unreadable = r"\begin{pmatrix} 1 & -1 \\ 1 & \phantom -1 \end{pmatrix}"
    assert score(unreadable, r"\boxed{5}") == {
        "reward": 0.0,
        "correct": 0.0,
        "answered": 1.0,
        "unread_gold": 1.0,
    }
    assert is_right(unreadable, unreadable)


def test_the_reward_needs_no_main_thread_and_says_nothing(capfd, caplog):
    found = []

    def run():
        found.append(is_right(r"\sqrt{12}", r"2\sqrt{3}"))

    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert found == [True]
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_the_parts_are_plain_numbers():
    assert json.loads(json.dumps(score("5", r"\boxed{5}")))["reward"] == 1.0


# The last number, where there is no box.


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She makes 9 * 2 = 18 dollars every day.", "18"),
        ("so she makes $18.", "18"),
        ("**$1,080.00**", "1,080.00"),
        ("It is \\textbf{18}!", "18"),
        ("\\(x = 18\\)", "18"),
        ("the answer is \u22125", "-5"),
        ("it is (-5).", "-5"),
        ("10 - 3", "3"),
        ("10 -3", "3"),
        ("15 \\%", "15 %"),
        ("\uff11\uff18 apples", "18"),
        ("half of it, \\frac{3}{4}, is left", "\\frac{3}{4}"),
        ("3/4 of it", "3/4"),
        ("1.5 \\times 10^{3}", "1.5 \\times 10^{3}"),
        ("20cm long", "20cm"),
        ("We need 3\n200", "200"),
        ("#### 18\nThat took 3 steps.", "18"),
        ("#### 18\n#### 19", "19"),
        ("#### Step 2\nThe total is 40.", "40"),
        ("#### 2. Add up\nThe total is 40.", "40"),
        ("The total is 40 at 3:30.", "40"),
        ("The total is 40 since 2024-05-06.", "40"),
        ("40 units of B12, H2O and COVID-19", "40"),
        ("40, where x_2 and x_{3} and x^4 and x^{5} and x^{-6}", "40"),
        ("40, not \\sqrt{25} or 2\\pi or 7x or 3\\sqrt{2}", "40"),
        ("40, or 1,5 or 1.2.3 or 1,0800", "40"),
        ("40 or 1e999", "40"),
        ("40 or " + "9" * 5000, "40"),
        ("five", None),
        ("", None),
        ("....", None),
        ("\\frac" * 50, None),
    ],
)
def test_the_last_number_is_found_as_it_is_written(text, number):
    assert last_number(text) == number


def test_without_a_box_the_last_number_counts_only_if_asked_for():
    response = "9 * 2 = 18, so she makes 18 dollars."
    assert score("18", response) == {"reward": 0.0, "correct": 0.0, "answered": 0.0}
    assert score("18", response, last_number=True)["correct"] == 1.0
    assert score("9", response, last_number=True) == {
        "reward": 0.0,
        "correct": 0.0,
        "answered": 1.0,
    }
    assert score("18", "I do not know.", last_number=True)["answered"] == 0.0


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{17}. Not 18",
        r"It is \boxed{18",
        r"It is 18, \boxed{",
        r"It is 18. \boxed{}",
        "<think>It is 18",
        "<think>It is 18</think>",
        "<think>It is 18</think> <think>18",
    ],
)
def test_a_box_goes_before_the_last_number_and_thoughts_hold_none(response):
    assert score("18", response, last_number=True)["correct"] == 0.0


def test_a_list_of_golds_is_not_met_by_its_last_number():
    assert score(["17", "18"], "17 and 18", last_number=True)["correct"] == 0.0


@given(INTEGERS, st.sampled_from(["{}", "{:,}", "${}.", "**{}**", "= {}\n", "({:,} apples)"]))
def test_any_integer_at_the_end_is_the_last_number(number, form):
    assert score(str(number), f"7 of 9 are {form.format(number)}", last_number=True)["correct"] == 1


@given(st.text(alphabet="0123456789.,:/-^_{}\\frac x%$#\n", max_size=60))
def test_the_last_number_of_any_text_is_a_number_that_stands_there(text):
    found = last_number(text)
    assert found is None or numeral(tidied(found)) is not None
