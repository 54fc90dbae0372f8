"""The maths reward: finding the boxed answer, and saying whether it is the gold one."""

import json
import logging
import threading
import time
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sortedrl.rewards.maths.reading import boxed_answer
from sortedrl.rewards.maths.reading import bracketed, folded, parts, tidied
from sortedrl.rewards.maths import math_reward
from sortedrl.rewards.maths.numbers import numeral
from sortedrl.rewards.score import NoScoreError, checked_score
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
    "fraction": lambda n: rf"\dfrac{{{3 * n}}}{{3}}",
    "slash": lambda n: f"{2 * n}/2",
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
    # A gold with a unit in letters could be a product.
    st.sampled_from(sorted(WRITE_INTEGER.keys() - {"unit in letters"})),
    st.sampled_from(sorted(WRITE_INTEGER)),
)
@settings(max_examples=400)
def test_a_whole_number_equals_itself_in_every_notation_and_no_other(number, gold, answer):
    wanted = WRITE_INTEGER[gold](number)
    assert is_right(wanted, WRITE_INTEGER[answer](number))
    assert not is_right(wanted, WRITE_INTEGER[answer](number + 1))


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
    if boxed_answer(rf"\boxed{{{gold}}}", after_thoughts=False) == gold.strip():
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
    assert boxed_answer(response) == answer


def test_thoughts_count_too_if_asked_for():
    assert boxed_answer(r"<think>\boxed{1}</think>", after_thoughts=False) == "1"


def test_thoughts_that_began_in_the_prompt_and_never_end_hold_no_answer():
    assert boxed_answer(r"Hm, \boxed{1}?", is_prefilled=True) is None
    assert boxed_answer(r"Hm, \boxed{1}?</think> \boxed{2}", is_prefilled=True) == "2"


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


@pytest.mark.parametrize("gold", [None, "", " . ", [], [""], True, {"a": 1}])
def test_a_gold_that_is_none_is_refused_aloud(gold):
    with pytest.raises(NoScoreError, match="gold answer"):
        score(gold, r"\boxed{5}")


def test_a_row_without_a_gold_is_refused_aloud():
    with pytest.raises(NoScoreError, match="field `answer`"):
        math_reward(Prompt(id=0, fields={"question": "?"}), r"\boxed{5}")


@pytest.mark.parametrize("fields", [{"alternatives": "5"}, {"error": "small"}])
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
