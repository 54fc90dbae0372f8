"""The form of a response: what is in it, what is not, and why."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.rewards.tags import (
    Tagged,
    Untagged,
    conclusion,
    read_tags,
    starts_in_thoughts,
)
from sortedrl.types import Prompt

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
INSIDE = st.text().filter(lambda text: not any(tag in text for tag in TAGS))
THOUGHTS = INSIDE.filter(lambda text: any(map(str.isalnum, text)))
SPACE = st.text(alphabet=" \n\t", max_size=3)
PIECES = st.sampled_from((*TAGS, "<THINK>", "<answer", "so", " ", "\n", "</", "think>", "1"))


@given(THOUGHTS, INSIDE, SPACE, SPACE, SPACE)
def test_a_response_in_the_form_gives_its_two_parts_back(think, answer, before, between, after):
    form = f"{before}<think>{think}</think>{between}<answer>{answer}</answer>{after}"
    assert read_tags(form) == Tagged(think, answer)


@given(THOUGHTS, INSIDE, SPACE, SPACE)
def test_a_pre_filled_tag_counts_as_the_first(think, answer, between, after):
    rest = f"{think}</think>{between}<answer>{answer}</answer>{after}"
    assert read_tags(rest, is_prefilled=True) == Tagged(think, answer)
    assert isinstance(read_tags("<think>" + rest, is_prefilled=True), Untagged)
    assert isinstance(read_tags(rest), Untagged)


@given(st.lists(PIECES, max_size=12).map("".join), st.booleans())
def test_only_the_form_is_taken_for_it(response, is_prefilled):
    """The rule once more, as one pattern."""
    tags = read_tags(response, is_prefilled=is_prefilled)
    text = "<think>" + response if is_prefilled else response
    inside = r"((?:(?!</?(?:think|answer)>).)*)"
    form = rf"\s*<think>{inside}</think>\s*<answer>{inside}</answer>\s*"
    match = re.fullmatch(form, text, flags=re.DOTALL)
    if match and re.search(r"\w", match[1]):
        assert tags == Tagged(match[1], match[2])
    else:
        assert isinstance(tags, Untagged)
        assert tags.reason


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("", "<think> must occur exactly once, found 0"),
        ("<answer>a</answer>", "<think> must occur exactly once, found 0"),
        ("<think>t<answer>a</answer>", "</think> must occur exactly once, found 0"),
        ("<think>t</think><answer>a", "</answer> must occur exactly once, found 0"),
        ("<think>t</think>" + "<answer>a</answer>" * 2, "<answer> must occur exactly once, found"),
        ("<THINK>t</THINK><answer>a</answer>", "<think> must occur exactly once, found 0"),
        ("<answer>a</answer><think>t</think>", "the tags must come in the order <think>"),
        ("<think>t<answer>a</answer></think>", "the tags must come in the order <think>"),
        (
            "Sure! <think>t</think><answer>a</answer>",
            "there must be no text before <think>, found 'S",
        ),
        (
            "<think>t</think>so<answer>a</answer>",
            "there must be no text between the parts, found 'so'",
        ),
        ("<think>t</think><answer>a</answer>!", "there must be no text after </answer>, found '!'"),
        ("<think> \n </think><answer>a</answer>", "the thought must hold at least one letter"),
        ("<think>\u200b...</think><answer>a</answer>", "the thought must hold at least one letter"),
    ],
)
def test_a_response_that_is_not_in_the_form_is_told_why(response, reason):
    tags = read_tags(response)
    assert isinstance(tags, Untagged)
    assert tags.reason.startswith(reason)


def test_a_thought_opened_again_is_told_of_the_prompt():
    tags = read_tags("<think>t</think><answer>a</answer>", is_prefilled=True)
    assert isinstance(tags, Untagged)
    assert tags.reason.endswith("found 2, counting the one the prompt ends in")


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("Solve it. <think>", True),
        ("Solve it.\n<think>\n", True),
        (
            [{"role": "user", "content": "Solve it."}, {"role": "assistant", "content": "<think>"}],
            True,
        ),
        ("Use <think> and <answer>.", False),
        ([{"role": "user", "content": "Solve it."}], False),
        ([{"role": "user", "content": "<think>"}, {"role": "user", "content": "Go."}], False),
        ("", False),
        ([], False),
        (None, False),
    ],
)
def test_a_prompt_is_pre_filled_when_its_last_text_ends_in_the_tag(prompt, answer):
    assert starts_in_thoughts(Prompt(id=0, fields={"prompt": prompt})) is answer


def test_how_the_text_the_model_saw_ends_goes_before_the_prompt():
    fields = {"prompt": "Solve it.", "prompt_end": "<|assistant|>\n<think>\n"}
    assert starts_in_thoughts(Prompt(id=0, fields=fields))
    assert not starts_in_thoughts(Prompt(id=0, fields={"prompt": "<think>", "prompt_end": "Go."}))
    assert not starts_in_thoughts(Prompt(id=0, end="Go.", fields={"prompt_end": "<think>"}))
    assert starts_in_thoughts(Prompt(id=0, end="<think>", fields={"prompt_end": "a column"}))


@given(st.lists(PIECES, max_size=12).map("".join), st.booleans())
def test_a_conclusion_is_what_stands_after_the_last_thought_that_ends(response, is_prefilled):
    """The rule once more, tag by tag."""
    is_thinking, kept = is_prefilled, ""
    for piece in re.split("(</?think>)", response):
        if piece in TAGS[:2]:
            is_thinking, kept = piece == "<think>", ""
        elif not is_thinking:
            kept += piece
    assert conclusion(response, is_prefilled=is_prefilled) == ("" if is_thinking else kept)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("5", "5"),
        ("<think>4</think>5", "5"),
        ("4</think>5", "5"),
        ("<think>5", ""),
        ("<think>4</think>5<think>6", ""),
        ("<think>4</think>5<think>6</think>7", "7"),
    ],
)
def test_thoughts_that_never_end_hold_no_answer(response, expected):
    assert conclusion(response) == expected
    assert conclusion("5", is_prefilled=True) == ""
