"""Tasks of reasoning-gym: rows of every one, and the library's scoring behind our reward."""

import json
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.errors import ConfigError
from sortedrl.rewards.gym import gym_reward, packed, tagged_answer, unpacked
from sortedrl.rewards.score import NoScoreError, checked_score
from sortedrl.tasks.gym import INSTRUCTION, GymSettings, gym_rows
from sortedrl.types import Prompt

pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: pip install 'sortedrl[gym]'")

from reasoning_gym.factory import DATASETS

# One of its libraries leaves a file open.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

TASKS = sorted(set(DATASETS) - {"composite"})
NO_GOLD = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks with many right answers, where the library gives none."""
EVALUATED = [
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
]
"""Tasks whose scorers hand the answer to `eval`."""
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


def rows_of(name, *, count=3, **options):
    return gym_rows(GymSettings(name=name, count=count, **options))


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
        # The library sometimes cannot solve an integral and gives it back as the gold.
        if gold is not None and "Integral(" not in gold:
            response = f"<think><answer>?</answer></think>\n<answer>\n{gold}\n</answer>"
            assert gym_reward(prompt, response)["correct"] == 1.0


@pytest.mark.parametrize("name", TASKS)
def test_no_task_raises_over_a_silly_answer_or_takes_it_for_right(name):
    (row,) = rows_of(name, count=1)
    for silly in SILLY:
        found = score(row, silly, partial=True)
        assert 0.0 <= checked_score(found).reward <= 1.0
        assert found["correct"] == (found["score"] >= 0.99)
        if silly.strip() == "abc":
            assert found["correct"] == 0.0


@pytest.mark.parametrize("name", ["countdown", "knights_knaves", "sudoku", "word_sorting"])
def test_the_same_settings_give_the_same_rows_and_another_seed_others(name):
    rows, others = rows_of(name, count=20), rows_of(name, count=20, seed=1)
    assert rows == rows_of(name, count=20)
    assert rows[:5] == rows_of(name, count=5)
    assert not {row.text for row in rows} & {row.text for row in others}


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
    rows_of("bf")
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
    (row,) = rows_of("chain_sum", count=1)
    nearly = f"It is {row.fields['answer']}, I think"
    found = score(row, nearly, partial=True)
    assert 0 < found["reward"] == found["score"] < 0.99
    assert score(row, nearly)["reward"] == 0.0
    assert score(row, nearly, right_from=0.01)["reward"] == 1.0


CODE = [
    "__import__('os').system('touch {path}')",
    "[__import__('os').system('touch {path}')]",
    "open('{path}', 'w')",
    "[open][0]('{path}', 'w')",
    "(open)('{path}', 'w')",
    'exec(\'open("{path}", "w")\')',
    'sqrt(\'open("{path}", "w")\')',
    'sqrt(\'open%c"{path}", "w")\' % 40)',
    'sqrt(\'\\x6fpen\\x28"{path}", "w")\')',
    "[].append(1)",
    "(lambda: 1)()",
    "x.n(1)",
    "Integral(x, x)",
]


@pytest.mark.parametrize("code", CODE)
@pytest.mark.parametrize("name", EVALUATED)
def test_an_answer_that_is_code_is_never_run(name, code, tmp_path):
    (row,) = rows_of(name, count=1)
    path = tmp_path / "written"
    found = score(row, code.replace("{path}", str(path)))
    assert not path.exists()
    assert found["refused"] == 1.0
    assert found["reward"] == 0.0


@pytest.mark.parametrize("name", sorted(set(TASKS) - set(EVALUATED)))
def test_no_other_task_runs_an_answer(name, tmp_path):
    (row,) = rows_of(name, count=1)
    path = tmp_path / "written"
    for code in CODE[:5]:
        score(row, code.replace("{path}", str(path)))
        assert not path.exists()


def test_formulas_are_no_code():
    (row,) = rows_of("simple_integration", count=1)
    for formula in ("2*sqrt(x)*(x + 1)*exp(x) + log(x)*sin(2.5*X) + C", "-x**9/9 + .5*x - 3. + C"):
        assert "refused" not in score(row, formula)
    (row,) = rows_of("n_queens", count=1)
    assert "refused" not in score(row, "[['_', 'Q'], ['Q', '_']]")


def test_an_answer_that_a_scorer_cannot_read_is_wrong_and_seen():
    (row,) = rows_of("prime_factorization", count=1)
    found = score(row, "two times three")
    assert (found["reward"], found["unreadable"]) == (0.0, 1.0)


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
        from sortedrl.tasks.gym import GymSettings, gym_rows
        try:
            gym_rows(GymSettings(name="countdown"))
        except ConfigError as error:
            print(error)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert "sortedrl[gym]" in run.stdout
