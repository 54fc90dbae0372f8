"""The view of a run under a notebook's cell, and what is shown there; no notebook is needed."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from sortedrl.core.events import End, Harvest
from sortedrl.report.live_state import Source
from sortedrl.runs.output import NotebookView, is_notebook, notebook_view, show_page


@pytest.fixture
def cell(monkeypatch):
    """A kernel with nothing but a display; gives what was shown, each time anew."""
    shown = []
    display = ModuleType("IPython.display")
    display.HTML = str

    def show(html, display_id=False):
        shown.append(html)
        return SimpleNamespace(update=shown.append)

    display.display = show
    for name, module in (
        ("ipykernel", ModuleType("ipykernel")),
        ("IPython", ModuleType("IPython")),
        ("IPython.display", display),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    return shown


def source():
    return Source(
        schedule="sorted/partial",
        slots=4,
        update_batch=2,
        max_tokens=8,
        device="cpu",
        decoded=lambda: 0,
        seconds=lambda: 0.0,
        figures=lambda: None,
    )


def test_this_process_is_no_notebook():
    assert not is_notebook()
    show_page("<p>nothing is shown</p>")


def test_a_run_is_a_table_that_is_redrawn_in_place(cell):
    assert is_notebook()
    with notebook_view() as view:
        view.watch(source())
        view.advance("update 1: 2 answers ready", 0.25)
        view.updated({"update": 1, "reward/mean": 0.5, "total/seconds": 3.0})
        view.updated({"update": 1, "evaluation/score": 0.75})
        view.tell("update    1  reward  0.500")
        view.tell("for 16 rows: <sizes>")
    last = cell[-1]
    assert cell[0] == "loading"
    assert "<th>reward</th><th>score</th>" in last
    assert "<td>0.5</td>" in last
    assert 'value="0.2500"' in last
    assert "for 16 rows: &lt;sizes&gt;" in last
    assert "update    1" not in last, "the table has it already"


def test_old_rows_leave_the_table_and_frames_are_few():
    shown = []
    view = NotebookView(shown.append)
    counts = {"waiting": 0, "running": 0, "engine_decoded": 1, "engine_prefilled": 1}
    harvest = Harvest(seconds=1.0, round=0, ready=3, **counts)
    for number in range(1000):
        view.updated({"update": number})
        view(harvest)
    assert len(shown) < 100
    view.draw()
    assert shown[-1].count("<tr>") == 9
    assert "waiting for the rewards of 3 answers" in shown[-1]


def test_shares_are_percentages_as_on_the_terminal():
    shown = []
    view = NotebookView(shown.append)
    view.updated({"update": 1, "rollout/bubble": 0.0388, "reward/mean": 0.25})
    view.draw()
    assert "<td>1</td><td>0.25</td><td>3.9 %</td>" in shown[-1]


def test_a_run_that_is_over_says_so_with_a_full_bar(cell):
    with notebook_view() as view:
        view.advance("trained on 8 answers", 0.875)
        view(End(seconds=9.0, rounds=4, trained=32))
    assert "finished: 32 answers trained" in cell[-1]
    assert 'value="1.0000"' in cell[-1]


def test_a_page_is_shown_in_a_frame_of_its_own(cell):
    show_page('<p class="a">hello</p>')
    assert cell == [
        '<div><iframe srcdoc="&lt;p class=&quot;a&quot;&gt;hello&lt;/p&gt;" '
        'style="width: 100%; height: 900px; border: 0"></iframe></div>'
    ]
