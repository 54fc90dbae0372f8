import sys

import pytest

from knights_reading import read_puzzle
from sortedrl.data.knights_puzzle import parse_puzzle
from sortedrl.data.knights_rows import published_rows
from sortedrl.errors import ConfigError, DataError
from test_knights_solver import brute_force
from test_knights_traces import check

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra: data)")
parquet = pytest.importorskip("pyarrow.parquet")

ROLE_WORDS = {"knight": "knight", "knave": "knave", "a_knight": "a knight", "Knave": "Knave"}


def record(**changes):
    """A row with the columns of the published sets."""
    row = {
        "quiz": "An island of knights and knaves. You meet 2 inhabitants: Jack, and Jackson. "
        '"Jackson is a knave if and only if Jack is a knight," Jack claimed. '
        "Jackson said that Jack is a knave and Jackson is a knave. "
        "So who is a knight and who is a knave?",
        "names": ["Jack", "Jackson"],
        "knight_knave": ROLE_WORDS,
        "solution": [True, False],
        "statements": "(('<=>', ('lying', 1), ('telling-truth', 0)), "
        "('and', ('lying', 0), ('lying', 1)))",
        "prompt": [{"role": "user", "content": "<|im_start|>ready-made"}],
        "solution_text_format": "(1) Jack is a knight\n(2) Jackson is a knave",
    }
    return row | changes


def written(path, *records):
    parquet.write_table(pyarrow.Table.from_pylist(list(records)), path)
    return path


def three_people():
    return record(
        quiz='Three of them: Ada, Bo, and Cy. In Ada\'s words: "Bo is not a knight". '
        'As Bo put it, "Cy is a knave". "Bo is a knight if and only if Ada is a knave" - Cy. Who?',
        names=["Ada", "Bo", "Cy"],
        solution=[True, False, True],
        statements="(('not', ('telling-truth', 1)), ('lying', 2), "
        "('<=>', ('telling-truth', 1), ('lying', 0)))",
        solution_text_format="(1) Ada is a knight\n(2) Bo is a knave\n(3) Cy is a knight",
    )


@pytest.mark.parametrize("published", [record(), three_people()], ids=["two", "three"])
def test_a_row_is_made_from_the_quiz_and_checked_against_its_statements(tmp_path, published):
    path = written(tmp_path / "train.parquet", published)
    (row,) = published_rows(path)
    assert [message["role"] for message in row.prompt] == ["system", "user"]
    assert row.text == published["quiz"]
    assert "ready-made" not in str(row.prompt)
    assert row.place == f"{path}:1"
    names, response = published["names"], row.fields["response"]
    assert row.fields == {
        "names": names,
        "solution": published["solution"],
        "statements": published["statements"],
        "level": len(names),
        "answer": published["solution_text_format"],
        "roles": ["knight", "knave"],
        "response": response,
    }
    puzzle = parse_puzzle(published["statements"])
    assert read_puzzle(row.text, names) == puzzle
    assert check(puzzle, names, response) == tuple(published["solution"])


def test_other_role_words_are_taken_over(tmp_path):
    words = {"knight": "angel", "knave": "devil"}
    (row,) = published_rows(written(tmp_path / "a.parquet", record(knight_knave=words)))
    assert row.fields["answer"] == "(1) Jack is an angel\n(2) Jackson is a devil"


def test_a_folder_gives_the_rows_of_all_its_files_in_order(tmp_path):
    (tmp_path / "3ppl").mkdir()
    (tmp_path / "2ppl").mkdir()
    written(tmp_path / "3ppl" / "train.parquet", record())
    written(tmp_path / "2ppl" / "train.parquet", record(), record())
    places = [row.place for row in published_rows(tmp_path)]
    assert [place.removeprefix(f"{tmp_path}/") for place in places] == [
        "2ppl/train.parquet:1",
        "2ppl/train.parquet:2",
        "3ppl/train.parquet:1",
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"statements": "(('lying', 1), ('liar', 0))"}, "must start with one of"),
        ({"statements": "(('lying', 0),)"}, "one entry per person, got 2, 2 and 1"),
        ({"statements": None}, "statements must be of type str"),
        ({"names": ["Jack"]}, "one entry per person, got 1, 2 and 2"),
        ({"names": ["Jack", "Jack"]}, "names must differ"),
        ({"names": ["Jack", None]}, "names must hold str values"),
        ({"solution": [False, True]}, r"must be the only one of the statements, got \[False"),
        ({"quiz": None}, "quiz must be of type str"),
        ({"knight_knave": {"knight": None, "knave": "knave"}}, "knight must be of type str"),
        (
            {"knight_knave": {"knight": "liar", "knave": "liar"}},
            "neither of them part of the other",
        ),
    ],
)
def test_a_malformed_row_is_refused_with_file_row_and_reason(tmp_path, changes, reason):
    path = written(tmp_path / "train.parquet", record(), record(**changes))
    with pytest.raises(DataError, match=f"train.parquet:2: .*{reason}"):
        published_rows(path)


def test_a_puzzle_with_two_solutions_is_refused(tmp_path):
    row = record(statements="(('telling-truth', 1), ('telling-truth', 0))", solution=[True, True])
    with pytest.raises(DataError, match=r"but the statements have \[\[True, True\], \[False"):
        published_rows(written(tmp_path / "a.parquet", row))


def test_missing_columns_are_named(tmp_path):
    row = record()
    del row["statements"], row["names"]
    with pytest.raises(DataError, match="unknown column 'names'"):
        published_rows(written(tmp_path / "a.parquet", row))


def test_what_is_no_parquet_file_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read"):
        published_rows(path)
    path.write_text("quiz,names\n")
    with pytest.raises(DataError, match="not Parquet"):
        published_rows(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="must hold Parquet files, found none"):
        published_rows(tmp_path / "empty")


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"sortedrl\[data\]"):
        published_rows(tmp_path / "a.parquet")


def test_every_published_row_is_read_and_solved(published_data):
    folder = published_data / "kk_logic_rl"
    rows = published_rows(folder)
    assert len(rows) == 4500
    records = []
    for file in sorted(folder.rglob("*.parquet")):
        records += parquet.read_table(file).to_pylist()
    for number, (row, published) in enumerate(zip(rows, records, strict=True)):
        names = row.fields["names"]
        puzzle = parse_puzzle(published["statements"])
        assert puzzle.text == row.fields["statements"] == published["statements"]
        assert read_puzzle(row.text, names) == puzzle
        assert row.fields["answer"] == published["solution_text_format"]
        if number % 15 == 0:
            assert brute_force(puzzle.text) == {tuple(row.fields["solution"])}
            check(puzzle, names, row.fields["response"])
