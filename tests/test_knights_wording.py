import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knights_reading import read_puzzle, read_statement
from sortedrl.data.knights_puzzle import MAX_DEPTH, Claim, Compound, Puzzle, parse_puzzle
from sortedrl.data.knights_rows import generate
from sortedrl.data.knights_wording import NAMES, Roles, answer_text, draw_names, phrase, quiz
from sortedrl.errors import ConfigError
from test_knights_puzzle import puzzles

THREE = ("Ada", "Bruno", "Clara")
ROLES = (Roles(), Roles("angel", "devil"), Roles("oracle", "witch"), Roles("hero", "spy"))


@given(puzzles(least=2, most=8), st.sampled_from(ROLES), st.integers(0, 2**32))
def test_reading_the_words_gives_the_puzzle_back(puzzle, roles, seed):
    names = draw_names(puzzle.people, seed)
    text = quiz(puzzle, names, roles=roles, seed=seed)
    assert read_puzzle(text, names, roles=roles) == puzzle


@given(puzzles(least=2, most=8), st.integers(0, 2**32))
def test_a_text_is_made_of_sentences_and_introduces_everyone(puzzle, seed):
    names = draw_names(puzzle.people, seed)
    text = quiz(puzzle, names, seed=seed)
    assert text.endswith("?")
    assert not re.search(r"\{|\}|  |\n|\.\.|,,|,\.| ,| \.", text)
    assert text.count('"') % 2 == 0
    assert all(name in text for name in names)
    sentences = re.split(r'(?<=[.?]) |(?<=[.?]") ', text)
    assert all(sentence[0].isupper() or sentence[0] == '"' for sentence in sentences)


def test_the_seed_picks_the_words_and_nothing_else():
    (puzzle,) = generate(3, 1)
    texts = {quiz(puzzle, THREE, seed=seed) for seed in range(50)}
    assert len(texts) > 40
    assert quiz(puzzle, THREE, seed=1) == quiz(puzzle, THREE, seed=1)


def test_no_name_is_a_part_of_another_or_a_word_of_the_text():
    lower = [name.lower() for name in NAMES]
    assert not [(a, b) for a in lower for b in lower if a != b and a in b]
    assert len(set(lower)) == len(lower) >= 50
    (puzzle,) = generate(8, 1)
    letters = [f"Person{letter}" for letter in "ABCDEFGH"]
    words = {
        word.lower()
        for seed in range(200)
        for word in re.findall(r"\w+", quiz(puzzle, letters, seed=seed))
    }
    assert not words & set(lower)


@given(st.integers(2, 8), st.integers(0, 2**64))
def test_drawn_names_differ(count, seed):
    names = draw_names(count, seed)
    assert len(set(names)) == count
    assert set(names) <= set(NAMES)


def K(person):
    return Claim(person, is_knight=True)


def L(person):
    return Claim(person, is_knight=False)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (K(0), "Ada is a knight"),
        (Compound("not", (L(1),)), "Bruno is not a knave"),
        (Compound("and", (K(0), L(1))), "Ada is a knight and Bruno is a knave"),
        (
            Compound("or", (K(0), L(1), K(2))),
            "Ada is a knight, Bruno is a knave, or Clara is a knight",
        ),
        (Compound("->", (K(0), L(1))), "if Ada is a knight then Bruno is a knave"),
        (Compound("<=>", (K(0), L(1))), "Ada is a knight if and only if Bruno is a knave"),
        (
            Compound("not", (Compound("and", (K(0), L(1))),)),
            "it is not the case that both Ada is a knight and Bruno is a knave",
        ),
        (
            Compound("and", (Compound("not", (Compound("or", (K(0), K(1))),)), K(2))),
            "both it is not the case that either Ada is a knight or Bruno is a knight, "
            "and Clara is a knight",
        ),
        (
            Compound("<=>", (K(0), Compound("and", (K(1), K(2), L(0))))),
            "either both or neither of these two hold: Ada is a knight; and all three of these "
            "hold: Bruno is a knight, Clara is a knight, and Ada is a knave",
        ),
        (
            Compound("or", (K(0), K(1), Compound("<=>", (K(1), K(2))))),
            "at least one of these three holds: Ada is a knight; Bruno is a knight; or either "
            "both or neither of these two hold: Bruno is a knight and Clara is a knight",
        ),
    ],
)
def test_statements_are_worded_so_that_they_can_be_told_apart(statement, words):
    assert phrase(statement, THREE) == words
    assert read_statement(words, THREE) == statement


def test_or_is_explained_where_it_is_said():
    plain = Puzzle((Compound("and", (K(0), K(1))), L(0)))
    deep = Puzzle((Compound("not", (Compound("or", (K(0), K(1))),)), L(0)))
    assert 'says "or"' not in quiz(plain, THREE[:2])
    assert 'says "or"' in quiz(deep, THREE[:2])


def test_an_answer_has_a_numbered_line_for_each_person():
    assert answer_text(THREE, (True, False, True)) == (
        "(1) Ada is a knight\n(2) Bruno is a knave\n(3) Clara is a knight"
    )
    assert answer_text(("Ada",), (True,), roles=ROLES[1]) == "(1) Ada is an angel"


PUBLISHED_REPORTS = [
    '{n} was heard saying, "{s}".',
    '"{s}," {n} mentioned.',
    '"{s}" - {n}.',
    '{n} asserted: "{s}".',
    'In {n}\'s words: "{s}".',
    'In a statement by {n}: "{s}".',
    'As {n} put it, "{s}".',
    'According to {n}, "{s}".',
    '{n} said, "{s}."',
    "{n} said that {s}.",
    "{n} told you that {s}.",
]


@pytest.mark.parametrize("report", PUBLISHED_REPORTS)
@pytest.mark.parametrize("other", PUBLISHED_REPORTS)
def test_the_published_kinds_of_reports_are_read_in_any_order(report, other):
    names = ("Jack", "Jackson")
    said = report.format(n="Jack", s="If Jackson is a knight then Jack is a knave")
    answered = other.format(n="Jackson", s="Jack is not a knave")
    text = (
        "An island has knights and knaves. You meet 2 inhabitants: Jack, and Jackson. "
        f"{said} {answered} So who is a knight and who is a knave?"
    )
    wanted = "(('->', ('telling-truth', 1), ('lying', 0)), ('not', ('lying', 0)))"
    assert read_puzzle(text, names).text == wanted


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('Ada says: "Bruno is a knave."', "no statement by Bruno can be read"),
        ("", "no statement by Ada can be read"),
        (
            'Ada says: "Bruno is a knave." Ada says: "Bruno is a knave."',
            "Ada speaks twice",
        ),
        (
            'Ada says: "Bruno is a knight or Ada is a knave and Bruno is a knave."',
            "no statement by Ada can be read",
        ),
    ],
)
def test_a_text_in_which_not_everyone_speaks_once_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        read_puzzle(text, ("Ada", "Bruno"))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "one of the names|a name"),
        ("Emil is a knight", "one of the names Ada, Bruno, Clara"),
        ("Ada is a baker", "knight or knave"),
        ("Ada is a knight and", "a name"),
        ("Ada is a knight Bruno is a knave", "'and', 'or' or 'if and only if'"),
        ("Ada is a knight and Bruno is a knave or Clara is a knave", "the end"),
        ("if Ada is a knight", "'then'"),
        ("all many of these hold: Ada is a knight", "a number"),
        ("all three of these hold: Ada is a knight Bruno is a knight", "a comma or a semicolon"),
        ("it is not the case that " * (MAX_DEPTH + 1) + "Ada is not a knight", "nested deeper"),
    ],
)
def test_words_that_are_no_statement_are_refused(words, reason):
    with pytest.raises(ValueError, match=reason):
        read_statement(words, THREE)


def test_the_deepest_statement_that_can_be_parsed_can_be_worded():
    text = "(" + "('not', " * MAX_DEPTH + "('lying', 0)" + ")" * MAX_DEPTH + ",)"
    puzzle = parse_puzzle(text)
    (statement,) = puzzle.statements
    assert read_statement(phrase(statement, THREE), THREE) == statement


@pytest.mark.parametrize(
    ("words", "singular", "plural"),
    [
        (("angel", "devil"), "an angel", "angels"),
        (("hero", "liar"), "a hero", "heroes"),
        (("spy", "priest"), "a spy", "spies"),
        (("witch", "fool"), "a witch", "witches"),
    ],
)
def test_role_words_get_their_article_and_plural(words, singular, plural):
    roles = Roles(*words)
    assert (roles.a(True), roles.plural(True)) == (singular, plural)


@pytest.mark.parametrize(
    "words",
    [
        ("knight", "knight"),
        ("liar", "superliar"),
        ("truth-teller", "liar"),
        ("Knight", "knave"),
        ("", "a b"),
    ],
)
def test_role_words_that_cannot_be_told_apart_are_refused(words):
    with pytest.raises(ConfigError, match=r"knights\.roles must be"):
        Roles(*words)
