from dataclasses import replace
from textwrap import dedent

import pytest

from sortedrl.errors import ConfigError
from sortedrl.report.lanes import ticks
from sortedrl.simulate.compare import simulate
from sortedrl.simulate.settings import PRESETS


def told(preset: str = "six", **schedule) -> str:
    simulation = PRESETS[preset]()
    events = []
    simulate(
        replace(simulation, schedule=replace(simulation.schedule, **schedule)),
        record=events.append,
    )
    return ticks(events)


def golden(text: str) -> str:
    return dedent(text).strip("\n")


def test_sync_waits_for_the_longest_answer_of_each_batch():
    assert told(strategy="sync", mode="on_policy") == golden(
        """
        sync: 4 slots, 18 seconds

        second   0    5    10   15
        slot 1   AA.....|DDDDD....|
        slot 2   BBBBBBB|EEEE.....|
        slot 3   CCC....|FFFFFFFFF|
        slot 4   .......|.........|

        A: a token of prompt A   .: idle slot   |: update

          0 s  load group 0: A B C; start A B C
          2 s  A is complete with 2 tokens
          3 s  C is complete with 3 tokens
          7 s  B is complete with 7 tokens
               harvest A C B
               update 1 trains A B C with 2 7 3 tokens; close group 0
          8 s  load group 1: D E F; start D E F
         12 s  E is complete with 4 tokens
         13 s  D is complete with 5 tokens
         17 s  F is complete with 9 tokens
               harvest E D F
               update 2 trains D E F with 5 4 9 tokens; close group 1
        """
    )


def test_posthoc_sorts_after_the_whole_group_is_written():
    assert told(strategy="posthoc", mode="on_policy") == golden(
        """
        posthoc: 4 slots, 14 seconds

        second   0    5    10
        slot 1   AAEEEE......||
        slot 2   BBBBBBB.....||
        slot 3   CCCFFFFFFFFF||
        slot 4   DDDDD.......||

        A: a token of prompt A   .: idle slot   |: update

          0 s  load group 0: A B C D E F; start A B C D
          2 s  A is complete with 2 tokens; start E
          3 s  C is complete with 3 tokens; start F
          5 s  D is complete with 5 tokens
          6 s  E is complete with 4 tokens
          7 s  B is complete with 7 tokens
         12 s  F is complete with 9 tokens
               harvest A C D E B F
               update 1 trains A C E with 2 3 4 tokens
         13 s  update 2 trains D B F with 5 7 9 tokens, the oldest 1 update old; close group 0
        """
    )


def test_sorted_on_policy_throws_interrupted_answers_away_and_redraws_them():
    assert told(strategy="sorted", mode="on_policy") == golden(
        """
        sorted/on_policy: 4 slots, 12 seconds

        second   0    5    10
        slot 1   AAeee|BBB..|
        slot 2   bbbbb|EEEEE|
        slot 3   CCCff|FFFFF|
        slot 4   DDDDD|.....|

        A: a token of prompt A   a: one discarded later   .: idle slot   |: update

          0 s  load group 0: A B C D E F; start A B C D
          2 s  A is complete with 2 tokens; start E
          3 s  C is complete with 3 tokens; start F
          5 s  D is complete with 5 tokens
               harvest A C D; interrupt B E F and discard their 5 3 2 tokens
               update 1 trains A C D with 2 3 5 tokens
          6 s  restart B E F from scratch
          9 s  B is complete with 3 tokens
         11 s  E F are complete with 5 5 tokens
               harvest B E F
               update 2 trains B E F with 3 5 5 tokens; close group 0
        """
    )


def test_sorted_partial_continues_interrupted_answers():
    assert told(strategy="sorted", mode="partial") == golden(
        """
        sorted/partial: 4 slots, 14 seconds

        second   0    5    10
        slot 1   AAEEE|BB.....|
        slot 2   BBBBB|E......|
        slot 3   CCCFF|FFFFFFF|
        slot 4   DDDDD|.......|

        A: a token of prompt A   .: idle slot   |: update

          0 s  load group 0: A B C D E F; start A B C D
          2 s  A is complete with 2 tokens; start E
          3 s  C is complete with 3 tokens; start F
          5 s  D is complete with 5 tokens
               harvest A C D; interrupt B E F and keep their 5 3 2 tokens
               update 1 trains A C D with 2 3 5 tokens
          6 s  resume B E F after 5 3 2 tokens
          7 s  E is complete with 4 tokens
          8 s  B is complete with 7 tokens
         13 s  F is complete with 9 tokens
               harvest E B F
               update 2 trains E B F with 4 7 9 tokens, the oldest 1 update old; close group 0
        """
    )


def test_sorted_coupled_keeps_what_the_new_weights_still_write():
    assert told(strategy="sorted", mode="coupled") == golden(
        """
        sorted/coupled: 4 slots, 14 seconds

        second   0    5    10
        slot 1   AAEEE|BBBBB..|
        slot 2   BBbbb|E......|
        slot 3   CCCFF|FFFFFFF|
        slot 4   DDDDD|.......|

        A: a token of prompt A   a: one discarded later   .: idle slot   |: update

          0 s  load group 0: A B C D E F; start A B C D
          2 s  A is complete with 2 tokens; start E
          3 s  C is complete with 3 tokens; start F
          5 s  D is complete with 5 tokens
               harvest A C D; interrupt B E F and keep their 5 3 2 tokens
               update 1 trains A C D with 2 3 5 tokens
          6 s  resume B E F after 5 3 2 tokens, of which 2 3 2 are kept
          7 s  E is complete with 4 tokens
         11 s  B is complete with 7 tokens
         13 s  F is complete with 9 tokens
               harvest E B F
               update 2 trains E B F with 4 7 9 tokens; close group 0
        """
    )


def test_answers_to_one_prompt_are_told_apart_in_the_story():
    text = told(strategy="sorted", mode="coupled", samples_per_prompt=2, harvest_unit="prompt")
    text = " ".join(text.split())
    assert "load group 0: A0 A1 B0 B1 C0 C1 D0 D1 E0 E1 F0 F1" in text
    assert "C0 D0 waited through the update and are queued again with 4 2 tokens" in text
    assert "resume C1 D1 C0 D0 after 4 1 4 2 tokens, of which 3 1 0 2 are kept" in text


def test_stale_tokens_that_are_dropped_start_again_from_nothing():
    text = told(strategy="sorted", mode="partial", max_staleness=0)
    assert "restart B E F from scratch" in text
    assert "slot 2   bbbbb|" in text


def test_a_run_whose_steps_do_not_take_one_second_is_refused():
    paper = PRESETS["paper"]()
    events = []
    schedule = replace(paper.schedule, group_prompts=4, update_batch=2)
    simulate(replace(paper, groups=1, schedule=schedule), record=events.append)
    with pytest.raises(ConfigError, match="decode steps take 1 second"):
        ticks(events)


def test_more_prompts_than_letters_are_refused():
    with pytest.raises(ConfigError, match="at most 26 are possible, got 128"):
        told("picture", strategy="sync", mode="on_policy")
