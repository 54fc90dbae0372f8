"""Tasks of reasoning-gym: rows of every one, and the library's scoring behind our reward."""

import ast
import builtins
import datetime
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import process_time
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.data.gym import INSTRUCTION, GymSettings, _entries, _rows, gym_rows
from sortedrl.errors import ConfigError
from sortedrl.rewards import gym
from sortedrl.rewards.gym import gym_reward, packed, tagged_answer, unpacked
from sortedrl.rewards.gym_formulas import (
    RefusedError,
    formula,
    has_conclusion,
    is_antiderivative,
    is_conclusion,
    is_product,
)
from sortedrl.rewards.gym_rules import RULES
from sortedrl.rewards.pool.score import NoScoreError, checked_score
from sortedrl.types import Prompt

pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: pip install 'sortedrl[gym]'")

from reasoning_gym.factory import DATASETS

# One of its libraries leaves a file open.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

TASKS = sorted(set(DATASETS) - {"composite"})
NO_GOLD = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks with many right answers, where the library gives none."""
EVALUATED = {
    "binary_matrix",
    "bitwise_arithmetic",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "number_sorting",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
}
"""Tasks whose scorers evaluate text: the answer, or a part of the row."""
SILLY = [
    "",
    "abc",
    "5",
    "1 2 3",
    "[1, 2",
    "{}",
    "None",
    "1e400",
    "9" * 5000,
    '{"a": 1}',
    "\u2211 \x00",
]


def gym_rows_here(settings):
    """Rows made in this process: faster, and for most tasks those of `gym_rows`."""
    return _rows(_entries(settings), settings)


def fresh_rows(name, *, count=3, **options):
    return gym_rows_here(GymSettings(name=name, count=count, **options))


rows_of = cache(fresh_rows)
"""Rows that several tests look at and none changes; some tasks take a second to make them."""


def prompt_of(row):
    """The prompt a worker process gets: its fields went through JSON."""
    return Prompt(id=0, fields=json.loads(json.dumps(dict(row.fields))))


def score(row, answer, **options):
    return gym_reward(prompt_of(row), f"<answer>{answer}</answer>", **options)


# Laws.

KEYS = st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.integers())
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.sampled_from(["!tuple", "!pairs", "a"]), inner)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_what_is_packed_survives_json(value):
    found = unpacked(json.loads(json.dumps(packed(value))))
    assert found == value
    assert repr(found) == repr(value)


@given(st.text(alphabet="<answer></think>x ", max_size=60))
def test_an_answer_stands_between_its_tags(text):
    found = tagged_answer(text)
    assert found is None or f"{found}" in text.rpartition("</think>")[2]


# Every task.


@pytest.mark.parametrize("name", TASKS)
def test_every_task_gives_rows_that_survive_json_and_whose_gold_is_right(name):
    for row in rows_of(name):
        prompt = prompt_of(row)
        assert unpacked(prompt.fields["entry"]) == unpacked(row.fields["entry"])
        assert row.text.endswith(INSTRUCTION)
        gold = row.fields.get("answer")
        assert (gold is None) == (name in NO_GOLD)
        if gold is not None:
            response = f"<think><answer>?</answer></think>\n<answer>\n{gold}\n</answer>"
            assert gym_reward(prompt, response)["correct"] == 1.0


@pytest.mark.parametrize("name", TASKS)
def test_no_task_raises_over_a_silly_answer_or_takes_it_for_right(name):
    (row,) = rows_of(name, count=1)
    for silly in SILLY:
        found = score(row, silly, partial=True)
        assert 0.0 <= checked_score(found).reward <= 1.0
        assert found["correct"] == (found["score"] == 1.0)
        if silly.strip() == "abc":
            assert found["correct"] == 0.0


@pytest.mark.parametrize("name", ["countdown", "knights_knaves", "sudoku", "word_sorting"])
def test_the_same_settings_give_the_same_rows_and_another_seed_others(name):
    rows, others = rows_of(name, count=20), rows_of(name, count=20, seed=1)
    assert rows == fresh_rows(name, count=20)
    assert rows[:5] == fresh_rows(name, count=5)
    assert not {row.text for row in rows} & {row.text for row in others}


GENERATE = """
import json, sys
from sortedrl.data.gym import GymSettings, _entries, _rows, gym_rows
def made(make, name):
    rows = make(GymSettings(name=name, count=8))
    return json.dumps([[row.prompt, row.fields, row.place, row.question] for row in rows])
makers = (gym_rows, lambda settings: _rows(_entries(settings), settings))
print(json.dumps([[made(make, name) for name in sys.argv[1:]] for make in makers]))
"""


def generated(*names, hash_seed):
    """What another process makes of some tasks: through a child process, and by itself."""
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, *names],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_rows_are_the_same_in_processes_that_shuffle_sets_otherwise():
    names = ("polynomial_multiplication", "ransom_note")
    one, other = (generated(*names, hash_seed=seed) for seed in (1, 2))
    assert one[0] == other[0]
    assert not set(one[1]) & set(other[1]), "these tasks need no child process any more"


def test_rows_are_the_same_on_another_day(monkeypatch):
    today = rows_of("time_intervals", count=20)

    class Day(datetime.date):
        @classmethod
        def today(cls):
            return cls(2001, 2, 3)

    class Moment(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2001, 2, 3, tzinfo=tz)

    monkeypatch.setattr("reasoning_gym.arithmetic.time_intervals.date", Day)
    other = SimpleNamespace(**{**vars(datetime), "date": Day, "datetime": Moment})
    monkeypatch.setattr("dateutil.parser._parser.datetime", other)
    assert fresh_rows("time_intervals", count=20) == today


@pytest.mark.parametrize("name", ["boxnet", "time_intervals"])
def test_rows_of_the_child_process_are_those_made_here(name):
    settings = GymSettings(name=name, count=4)
    assert gym_rows(settings) == gym_rows_here(settings)


def test_a_child_process_that_fails_is_told_in_one_sentence(monkeypatch):
    monkeypatch.setattr("sortedrl.data.gym._CHILD", "raise MemoryError('no room') or {path!r}")
    with pytest.raises(ConfigError, match=r"2 rows of gcd .* MemoryError: no room;"):
        gym_rows(GymSettings(name="gcd", count=2))


# The rows.


def test_options_reach_the_task_and_the_scoring():
    (row,) = rows_of("countdown", count=1, options=("min_numbers=3", "max_numbers=3"))
    entry = unpacked(row.fields["entry"])
    assert len(entry["metadata"]["numbers"]) == 3
    assert row.fields["options"] == {"min_numbers": 3, "max_numbers": 3}
    assert score(row, row.fields["answer"])["correct"] == 1.0


def test_an_option_that_is_no_json_is_text():
    (row,) = rows_of("caesar_cipher", count=1, options=("delimiter=.", "max_words=5"))
    assert row.fields["options"] == {"delimiter": ".", "max_words": 5}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"name": "countdwn"}, "did you mean 'countdown'"),
        ({"name": "composite"}, "unknown reasoning-gym task 'composite'"),
        ({"name": "countdown", "options": ("min_number=3",)}, "did you mean 'min_numbers'"),
        ({"name": "countdown", "options": ("seed=3",)}, "unknown option 'seed'"),
        ({"name": "countdown", "options": ("min_numbers=9", "max_numbers=3")}, "refuses"),
        ({"name": "countdown", "options": ("min_numbers",)}, "must be written name=value"),
        ({"count": 0}, "gym.count must be at least 1, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        gym_rows(GymSettings(**settings))


def test_a_difficulty_in_a_number_is_the_level():
    assert {row.fields["level"] for row in rows_of("quantum_lock", count=20)} > {1}
    assert "level" not in rows_of("countdown")[0].fields


def test_rows_have_a_place_and_may_go_without_an_instruction():
    (row,) = rows_of("word_sorting", count=1, instruction="")
    assert row.place == "reasoning_gym/word_sorting, seed 0: 1"
    assert INSTRUCTION not in row.text


def test_a_task_that_prints_is_silenced(capfd):
    fresh_rows("bf")
    assert capfd.readouterr().out == ""


# The reward.


def test_only_the_last_answer_after_the_thoughts_counts():
    assert tagged_answer("<answer>1</answer> no: <answer> 2 </answer>") == "2"
    assert tagged_answer("<think><answer>1</answer></think> <answer>2</answer>") == "2"
    assert tagged_answer("<think><answer>1</answer></think>") is None
    assert tagged_answer("<answer>1</answer></think>", after_thoughts=False) == "1"
    assert tagged_answer("<think>Hm. <answer>1</answer>") is None
    assert tagged_answer("Hm. <answer>1</answer>", is_prefilled=True) is None
    assert tagged_answer("<answer>1") is None
    assert tagged_answer("</answer><answer>") is None
    assert tagged_answer("1") is None


def test_without_an_answer_there_is_the_reward_for_that():
    (row,) = rows_of("word_sorting", count=1)
    found = gym_reward(prompt_of(row), "I do not know.", no_answer=-0.5)
    assert found == {"reward": -0.5, "correct": 0.0, "answered": 0.0, "score": 0.0}


def test_partial_credit_is_the_score_of_the_library():
    (row,) = rows_of("caesar_cipher", count=1)
    nearly = f"It is {row.fields['answer']}, I think"
    found = score(row, nearly, partial=True)
    assert 0 < found["reward"] == found["score"] < 0.99
    assert score(row, nearly)["reward"] == 0.0
    assert score(row, nearly, right_from=0.01)["reward"] == 1.0


@pytest.mark.parametrize("right_from", [0.0, -1.0, 1.5, float("nan")])
def test_a_bound_that_no_score_can_mean_is_refused(right_from):
    (row,) = rows_of("gcd", count=1)
    with pytest.raises(ConfigError, match="right_from must be above 0 and at most 1"):
        score(row, "1", right_from=right_from)


# No answer runs.


def called(function):
    """The objects that the source of a function calls or mentions, as far as names tell."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError):
        return
    scope = {**vars(builtins), **function.__globals__}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in scope:
            yield scope[node.id]
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name):
                owner = scope.get(node.value.id)
                if isinstance(owner, ModuleType) and node.attr in vars(owner):
                    yield vars(owner)[node.attr]
            # What a method of some object is called is all that is known of it.
            yield node.attr


def evaluates(scorer):
    """Whether something in reach of a scorer evaluates text."""
    methods = dict(inspect.getmembers(scorer))
    todo, seen = [methods["score_answer"]], set()
    while todo:
        function = inspect.unwrap(todo.pop())
        for found in called(function):
            if isinstance(found, str):
                found = methods.get(found)
            module = inspect.getmodule(found)
            if found in (eval, exec, compile, __import__) or (
                module is not None
                and callable(found)
                and module.__name__.split(".")[0] in {"sympy", "pickle", "yaml", "marshal", "runpy"}
            ):
                return True
            inner = [found] if inspect.isfunction(found) else []
            if inspect.isclass(found):
                inner = [value for _, value in inspect.getmembers(found, inspect.isfunction)]
            for one in inner:
                if one not in seen and one.__module__.startswith(("reasoning_gym", "magiccube")):
                    seen.add(one)
                    todo.append(one)
    return False


def test_no_scorer_that_evaluates_text_is_ever_called():
    assert set(RULES) == set(TASKS), "read the scorer of a new task, and add a rule for it"
    found = {name for name in TASKS if evaluates(DATASETS[name][0])}
    assert found == EVALUATED
    assert not [name for name in found if RULES[name].asks_library]


class Evaluating:
    """A scorer as a later version of the library might have it."""

    def __init__(self, is_silent):
        self.is_silent = is_silent

    def score_answer(self, answer, entry):
        try:
            return float(eval(answer))
        except Exception:
            if self.is_silent:
                return 1.0
            raise


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_scorer_that_evaluates_in_a_later_version_is_stopped_aloud(is_silent, monkeypatch):
    (row,) = rows_of("gcd", count=1)
    monkeypatch.setattr(gym, "_dataset", lambda task, options: Evaluating(is_silent))
    with pytest.raises(NoScoreError, match="must not evaluate text, but Evaluating"):
        score(row, "1 + 1")
    assert eval("1 + 1") == 2, "outside a scorer nothing is stopped"


def test_a_task_without_a_rule_is_refused(monkeypatch):
    (row,) = rows_of("gcd", count=1)
    others = {name: rule for name, rule in RULES.items() if name != "gcd"}
    monkeypatch.setattr(gym, "RULES", others)
    with pytest.raises(ConfigError, match="'gcd' must have a rule"):
        fresh_rows("gcd", count=1)
    with pytest.raises(ConfigError, match="'gcd' must have a rule"):
        score(row, "1")


CODE = "__import__('os').system('true')"
HOSTILE = [
    CODE,
    f"[{CODE}]",
    f"[[{CODE}]]",
    "exec('x = 1')",
    "open('/dev/null', 'w')",
    "(open)('/dev/null', 'w')",
    "[open][0]('/dev/null', 'w')",
    "[[x for x.y in [1]] for x in [0]]",
    "[1 for help.__class__.__getitem__ in [exec] for y in [help['1']]]",
    "[1 for list.__class_getitem__ in [exec]]",
    "[license._Printer__filenames for license._Printer__filenames in [['/dev/null']]]",
    "[x for license.__class__.__getitem__ in [license.__class__.__call__] for x in [license[0]]]",
    "['a', 'b'].__class__",
    "[1][[2][0]][3]",
    "[0][:].__add__",
    "(lambda: 1)()",
    "[(lambda: 1)]",
    "lambda x: x",
    "(x := 1)",
    "[y := 5, y**2]",
    "f'{1+1}'",
    "[f'{open(1)}']",
    "@print\nclass A: pass",
    "'a' * 999999999",
    "['a'] * 999999999",
    "[0] * 10 ** 9",
    "x.func",
    "x.func(1)",
    "x.n(1)",
    "x.__class__.__mro__",
    "sqrt('1')",
    "sin(x).func",
    "Integral(x, x)",
    "Symbol('x')",
    "factorial(10**9)",
    "100000!",
    "99999999999999999999!!",
    "gamma(10**9)",
    "9**9**9**9",
    "(9**9**9)*0",
    "x**99999999999",
    "(x + 1)**99999",
    "9" * 5000,
    "1e999999999",
    "1e-999999999",
    "1/1e999999999",
    "9" * 4000 + "/" + "7" * 4000,
    "-" * 1900 + "1",
    "(" * 1900 + "1" + ")" * 1900,
    "1" + "+1" * 900,
    "[" * 5000,
    "[" * 5000 + "]" * 5000,
    '{"a":' * 5000,
    "(" * 150 + "x" + ")" * 150,
    "sin(" * 90 + "x" + ")" * 90,
    "exp(" * 90 + "x" + ")" * 90,
    "¬" * 5000 + "P",
    "(" * 2500 + "P" + ")" * 2500,
    "P ∧ " * 4000 + "P",
    "\uff45\uff58\uff45\uff43('1')",
    "\U0001d4ee\U0001d501\U0001d4ee\U0001d4ec('1')",
    "\uff45val(1)",
    "x\u2024func",
    "__import__",
    "\\x6fpen(1)",
    "\x00",
    "R999999999",
    "R9 " * 5000,
    "A+999999999",
    "U" * 19_000,
    "A" * 19_000,
    "Move disk 1 from Peg 1 to Peg 99999999999",
    "1" + " " * 19_000 + "x",
    "\u00d7" * 19_000,
    ", " * 9_000,
    "\n" * 19_000,
    "**" * 900,
    '["' + "move(" + ", a" * 5000 + '"]',
    '[{"Agent[0.5, 0.5]": "move(' + "box_a, " * 2000 + '"}]',
    "{!r}",
    "%s%n",
    "$(touch x)",
    "!!python/object/apply:os.system ['true']",
    "\ud800",
    "A" * 30_000,
]
EVENTS = ("exec", "os.system", "subprocess.Popen", "open", "ctypes", "socket", "shutil", "os.exec")


@pytest.fixture(scope="module")
def seen():
    """What happens in this process as long as `seen["is_on"]`: code that runs, files, programs."""
    found = {"is_on": False, "events": []}

    def hook(event, arguments):
        if not found["is_on"]:
            return
        is_text = event == "compile" and arguments[1] == "<string>"
        if is_text or event.startswith(EVENTS):
            found["events"].append((event, str(arguments)[:200]))

    sys.addaudithook(hook)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TASKS)
def test_a_hostile_answer_neither_runs_nor_takes_long_nor_is_right(name, seen):
    (row,) = rows_of(name, count=1)
    score(row, "?")  # the library opens files of its own when a scorer is made
    seen["events"].clear()
    for answer in HOSTILE:
        start = process_time()
        seen["is_on"] = True
        try:
            found = score(row, answer)
        finally:
            seen["is_on"] = False
        assert seen["events"] == [], answer[:80]
        assert process_time() - start < 20, answer[:80]
        assert found["correct"] == 0.0, answer[:80]


def test_the_attack_would_be_seen(seen):
    seen["events"].clear()
    seen["is_on"] = True
    eval("[1 for x in [0]]")
    seen["is_on"] = False
    assert [event for event, _ in seen["events"]] == ["compile", "exec"]


NAMES = frozenset({"x", "C"})
FORMULAS = st.recursive(
    st.sampled_from(["x", "C", "0", "2", "3.5", ".5"]),
    lambda inner: (
        st.builds("({} {} {})".format, inner, st.sampled_from("+-*/"), inner)
        | st.builds("-{}".format, inner)
        | st.builds("{}({})".format, st.sampled_from(["sin", "exp", "sqrt"]), inner)
    ),
    max_leaves=10,
)


@given(FORMULAS)
def test_every_formula_is_read_as_python_reads_it(text):
    assert ast.unparse(formula(text, names=NAMES)) == ast.unparse(ast.parse(text, mode="eval"))


@given(st.text(alphabet="x C12.+-*/()sinexp_[]'\"\\:=,!{}\uff58\u00b2", max_size=30))
def test_only_known_nodes_come_out_of_any_text(text):
    try:
        tree = formula(text, names=NAMES)
    except RefusedError:
        return
    known = (ast.BinOp, ast.UnaryOp, ast.Call, ast.Name, ast.Constant, ast.operator, ast.unaryop)
    assert all(isinstance(node, (*known, ast.Load)) for node in ast.walk(tree))


# Tricks, and near misses.


def entry_of(row):
    return unpacked(row.fields["entry"])


@pytest.mark.parametrize("name", TASKS)
def test_no_number_that_is_none_is_right(name):
    for row in rows_of(name, count=2):
        gold = str(row.fields.get("answer", "0"))
        for none in ("nan", "inf", "-inf", "NaN", "Infinity", "sNaN", "1e999"):
            altered = re.sub(r"-?\d+(\.\d+)?", none, gold)
            for answer in {none, f"[{none}]", altered, altered.replace("'", "")} - {gold}:
                assert score(row, answer)["correct"] == 0.0, answer[:80]


@pytest.mark.parametrize("name", sorted(set(TASKS) - NO_GOLD))
def test_a_gold_among_other_words_is_wrong(name):
    for row in rows_of(name, count=2):
        gold = row.fields["answer"]
        others = [f"The answer is {gold}", f"{gold} or 0", f"{gold} x", f"{gold}, x", f"not {gold}"]
        for answer in others:
            assert score(row, answer)["correct"] == 0.0, answer[:80]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("puzzle24", "6*4*1*1"),
        ("puzzle24", "24"),
        ("countdown", "x/x"),
        ("countdown", "x - x + {target}"),
        ("countdown", "({answer})*x/x"),
        ("countdown", "({answer})*1"),
        ("coin_flip", "0"),
        ("complex_arithmetic", "nan"),
        ("complex_arithmetic", "nan + nani"),
        ("number_sorting", "[NaN, NaN, NaN, NaN, NaN, NaN, NaN, NaN, NaN]"),
        ("propositional_logic", "(P \u2228 Q \u2228 ¬P)"),
        ("gsm_symbolic", "-{answer}"),
        ("polynomial_equations", "none"),
        ("game_of_life_halting", "maybe"),
        ("simple_integration", "Integral({integrand}, {variable})"),
        ("intermediate_integration", "Integral({integrand}, {variable})"),
        ("polynomial_multiplication", "{polynomial_expr}"),
        ("rush_hour", "A+1 B+1 B-1 C+1 C-1 D+1 D-1 E+1 E-1 " * 100),
        ("rush_hour", "A+5"),
    ],
)
def test_a_trick_earns_nothing(name, answer):
    for row in rows_of(name, count=20):
        entry = entry_of(row)
        trick = answer.format(**{**entry["metadata"], "answer": entry["answer"]})
        # A product of numbers is multiplied out in the question.
        assert trick == entry["answer"] or score(row, trick)["correct"] == 0.0


def test_no_premise_is_a_conclusion_and_no_constant_is_one_mostly():
    rows = rows_of("propositional_logic", count=60)
    for row in rows:
        for premise in entry_of(row)["metadata"]["premises"]:
            assert score(row, premise)["correct"] == 0.0
    for constant in ("(P \u2228 Q)", "(P → Q)", "(P ∧ Q)", "(P ↔ Q)"):
        assert sum(score(row, constant)["correct"] for row in rows) < 30


def test_a_conclusion_needs_several_premises():
    metadata = {"premises": ["(P → Q)", "(Q → R)", "(S ∧ S)"], "variables": list("PQRS")}
    for answer in ("(P → R)", "P→R", "(¬R → ¬P)", "((P ∧ S) → R)"):
        assert is_conclusion(answer, {"metadata": metadata}) == 1, answer
    for answer in (
        "(P → Q)",
        "(P → (Q \u2228 R))",
        "(R → P)",
        "S",
        "(P → P)",
        "((P → R) ∧ (P → R))",
    ):
        assert is_conclusion(answer, {"metadata": metadata}) == 0, answer


def near_misses(name):
    """Golds of which one element is wrong, by a hair."""
    for row in rows_of(name, count=10):
        gold, metadata = row.fields["answer"], entry_of(row)["metadata"]
        if name == "game_of_life":
            yield row, gold[:-3] + str(1 - int(gold[-3])) + gold[-2:]
            yield row, gold[:-1] + ",[0]]"
        elif name in ("figlet_font", "letter_jumble", "spell_backward"):
            yield row, gold + "x"
            yield row, gold + " and more words"
        elif name == "number_sorting":
            yield row, str([float(one) + 0.5 for one in metadata["sorted_numbers"]])
        elif name == "pool_matrix":
            yield row, gold.replace(gold.split()[0], str(float(gold.split()[0]) + 0.02), 1)
        elif name in ("decimal_arithmetic", "complex_arithmetic"):
            yield (
                row,
                gold.replace(gold.split()[0], str(float(gold.split("i")[0].split()[0]) + 0.01)),
            )
        else:
            digit = max(place for place, char in enumerate(gold) if char.isdigit())
            yield row, gold[:digit] + str((int(gold[digit]) + 1) % 10) + gold[digit + 1 :]


@pytest.mark.parametrize(
    "name",
    [
        "advanced_geometry",
        "chain_sum",
        "complex_arithmetic",
        "decimal_arithmetic",
        "figlet_font",
        "game_of_life",
        "letter_jumble",
        "number_sorting",
        "polynomial_equations",
        "pool_matrix",
        "products",
        "rectangle_count",
        "simple_integration",
        "spell_backward",
        "time_intervals",
    ],
)
def test_what_is_nearly_right_is_wrong(name):
    for row, answer in near_misses(name):
        found = score(row, answer, partial=True)
        assert found["correct"] == 0.0, answer
        assert found["reward"] <= 0.99


def test_a_right_formula_may_be_written_in_many_ways():
    (row,) = rows_of("countdown", count=1)
    fields = {**row.fields, "entry": {"metadata": {"numbers": [2, 3, 4], "target": 20}}}
    prompt = Prompt(id=0, fields=fields)
    for answer, is_right in {
        "(2 + 3)*4": 1,
        "4 * ( 2+3 )": 1,
        "-(-2 - 3)*4": 1,
        "4*5": 0,
        "4*(2+3)*1": 0,
        "24 - 3 - 1": 0,
        "(2.0 + 3)*4": 0,
        "(2 + 3)*4 = 20": 0,
        "4*(2+3)/(2-2)": 0,
    }.items():
        assert gym_reward(prompt, f"<answer>{answer}</answer>")["correct"] == is_right, answer


@pytest.mark.parametrize(
    ("integrand", "right", "wrong"),
    [
        ("2*x", ["x**2", "x*x + C", "x**2 + 7", "(x + 1)**2 - 2*x"], ["x**2 + x", "C*x", "2*x"]),
        ("cos(x)*sin(x)", ["sin(x)**2/2", "-cos(x)**2/2 + C", "-cos(2*x)/4"], ["sin(x)"]),
        ("1/x", ["log(x) + C", "ln(x)", "log(abs(x))", "log(5*x)"], ["log(x + 1)", "x"]),
        ("exp(x)", ["exp(x) + C", "E**x", "E**(x) + C"], ["x*E", "exp(2*x)/2"]),
        ("sqrt(x)", ["2*x**(3/2)/3", "2*x*sqrt(x)/3"], ["x**(3/2)"]),
        ("asin(2*x)", ["x*asin(2*x) + sqrt(1 - 4*x**2)/2"], ["asin(2*x)**2"]),
    ],
)
def test_an_antiderivative_is_right_in_every_form(integrand, right, wrong):
    entry = {"metadata": {"integrand": integrand, "variable": "x"}}
    assert all(is_antiderivative(answer, entry) == 1 for answer in right)
    assert not any(is_antiderivative(answer, entry) for answer in wrong)


def test_a_polynomial_must_be_multiplied_out():
    entry = {"metadata": {"variables": ["x", "y"]}, "answer": "-2*x**2 + 3*x*y - 1"}
    for answer in ("3*x*y - 2*x**2 - 1", "-1 - x**2*2 + y*3*x", "-2*x*x + 3*y*x + 0*x - 1"):
        assert is_product(answer, entry) == 1
    for answer in ("-2*x**2 + 3*x*y", "x*(-2*x + 3*y) - 1", "-x**2 - x**2 + 3*x*y - 1"):
        with suppress(RefusedError):
            assert is_product(answer, entry) == 0


def test_rows_without_a_right_answer_are_left_out():
    assert not [
        row
        for row in rows_of("intermediate_integration", count=30)
        if "Integral" in row.fields["answer"]
    ]
    rows = rows_of("propositional_logic", count=30)
    assert rows[:10] == fresh_rows("propositional_logic", count=10)
    for row in rows:
        assert has_conclusion(entry_of(row))


def test_an_equation_without_solutions_has_an_empty_answer():
    (row,) = rows_of("polynomial_equations", count=1)
    entry = {**entry_of(row), "answer": ""}
    prompt = Prompt(id=0, fields={**row.fields, "answer": "", "entry": entry})
    for answer, is_right in {"": 1, '""': 1, "0": 0, "x": 0, "none": 0, "nan": 0}.items():
        assert gym_reward(prompt, f"<answer>{answer}</answer>")["correct"] == is_right, answer
    assert score(row, "")["answered"] == 0.0


def test_moves_in_rush_hour_must_be_possible():
    board = "ooooooooooooAAoBoooooBoooooooooooooo"
    entry = {"metadata": {"board_config": board}, "answer": None, "question": ""}
    prompt = Prompt(id=0, fields={"task": "rush_hour", "entry": entry})
    for moves, is_right in {
        "B-2 A+4": 1,
        "B-2, A+2 A+2": 1,
        "B+2 A+4": 1,
        "A+4": 0,
        "A+4 B-2 A+4": 0,
        "B-3 A+4": 0,
        "B-2 A+5": 0,
        "B-2 A+4 A-1": 0,
        "C+1 B-2 A+4": 0,
    }.items():
        assert gym_reward(prompt, f"<answer>{moves}</answer>")["correct"] == is_right, moves


def test_the_published_table_shows_every_task_by_its_rule():
    page = (Path(__file__).parent.parent / "docs" / "reference" / "gym-scorers.md").read_text()
    shown = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (library|ours) \|", page, re.MULTILINE)
    judges = {True: "library", False: "ours"}
    assert shown == [(name, RULES[name].reads, judges[RULES[name].judge is None]) for name in TASKS]


def test_an_answer_that_a_scorer_cannot_read_is_wrong_and_seen():
    (row,) = rows_of("game_of_life", count=1)
    found = score(row, '{"a": 1}')
    assert (found["reward"], found["unreadable"]) == (0.0, 1.0)


def test_an_answer_of_another_form_is_refused_and_seen():
    (row,) = rows_of("prime_factorization", count=1)
    found = score(row, "two times three")
    assert (found["reward"], found["refused"]) == (0.0, 1.0)


def test_a_halting_question_is_compared_by_its_text():
    rows = rows_of("game_of_life_halting", count=8)
    for row in rows:
        other = {"True": "False", "False": "True"}[row.fields["answer"]]
        assert score(row, row.fields["answer"].lower())["correct"] == 1.0
        assert score(row, other)["correct"] == 0.0


@pytest.mark.parametrize("fields", [{}, {"answer": "5"}, {"task": "countdown", "entry": "5"}])
def test_a_row_of_another_kind_is_refused_aloud(fields):
    with pytest.raises(NoScoreError, match="`task` and `entry`"):
        gym_reward(Prompt(id=0, fields=fields), "<answer>5</answer>")


def test_without_the_library_the_extra_is_named():
    program = """
        import sys
        sys.modules["reasoning_gym"] = None
        from sortedrl.errors import ConfigError
        from sortedrl.data.gym import GymSettings, gym_rows
        try:
            gym_rows(GymSettings(name="countdown"))
        except ConfigError as error:
            print(error)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert "sortedrl[gym]" in run.stdout
