"""From records to rows to tokens: columns, chat templates, and what is refused."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from sortedrl.config.data import DataSettings
from sortedrl.data.rows import Record, Row, rows_of, with_system
from sortedrl.data.stream import PromptStream, rendered, tokenized
from sortedrl.errors import ConfigError, DataError
from sortedrl.rewards.tags import starts_in_thoughts

WORDS = ["<unk>", "<s>", "</s>", "<user>", "<system>", "<assistant>", "how", "many", "be", "brief"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(*, template=TEMPLATE, ends=False):
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pattern = "<s> $A </s>" if ends else "<s> $A"
    words.post_processor = processors.TemplateProcessing(
        single=pattern, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=["<user>", "<system>", "<assistant>"],
    )
    fast.chat_template = template
    return fast


def row(prompt):
    return Row(prompt=prompt, fields={}, place="rows.jsonl:7")


def tokens_of(prompt, *, chat="auto", **options):
    fast = tokenizer(**options)
    return [WORDS[token] for token in rendered(row(prompt), fast, chat=chat).tokens]


def rows(*values, **settings):
    records = [Record(f"rows.jsonl:{n}", value) for n, value in enumerate(values, start=1)]
    return list(rows_of(records, DataSettings(**settings)))


def test_every_column_but_the_prompt_goes_to_the_reward():
    (only,) = rows({"prompt": "how many", "answer": "3", "level": 2, "x": [1]})
    assert only.prompt == "how many"
    assert only.fields == {"answer": "3", "level": 2, "x": [1]}


def test_columns_are_found_under_the_names_given():
    (only,) = rows({"question": "how", "gold": 3}, prompt_field="question", answer_field="gold")
    assert (only.prompt, only.fields) == ("how", {"answer": 3})


def test_chat_messages_are_a_prompt_too():
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how"}]
    (only,) = rows({"prompt": messages})
    assert only.prompt == tuple(messages)
    assert only.text == "how"


def test_a_system_message_is_put_before_the_prompt():
    assert with_system(row("how"), "be brief").prompt == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "how"},
    )


@pytest.mark.parametrize(
    ("values", "settings", "words"),
    [
        ({}, {}, "the row is empty; drop it"),
        ({"promt": "x"}, {}, "unknown column 'prompt'; did you mean 'promt'"),
        ({"prompt": "x"}, {"answer_field": "gold"}, "unknown column 'gold'"),
        ({"prompt": " "}, {}, "the prompt is empty"),
        ({"prompt": 3}, {}, "must be text or a list of chat messages, got 3"),
        ({"prompt": []}, {}, "must be text or a list of chat messages"),
        ({"prompt": [{"role": "user"}]}, {}, "must have `role` and `content`"),
        ({"prompt": [{"role": "usr", "content": "x"}]}, {}, "did you mean 'user'"),
        ({"prompt": [{"role": "user", "content": 1}]}, {}, "content must be text"),
    ],
)
def test_a_malformed_row_is_refused_with_its_place(values, settings, words):
    with pytest.raises(DataError, match=f"rows.jsonl:1: .*{words}"):
        rows(values, **settings)


def test_a_row_keeps_its_own_system_message():
    with pytest.raises(DataError, match=r"rows.jsonl:7: the row has its own system message"):
        with_system(row(({"role": "system", "content": "x"},)), "y")


def test_the_chat_template_is_applied_once():
    assert tokens_of("how many") == ["<s>", "<user>", "how", "many", "<assistant>"]


def test_messages_keep_their_roles():
    messages = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "how"})
    expected = ["<s>", "<system>", "be", "brief", "<user>", "how", "<assistant>"]
    assert tokens_of(messages) == expected


def test_an_answer_that_is_begun_is_continued():
    messages = ({"role": "user", "content": "how"}, {"role": "assistant", "content": "many"})
    assert tokens_of(messages) == ["<s>", "<user>", "how", "<assistant>", "many"]


def test_without_a_template_the_prompt_is_plain_text():
    assert tokens_of("how many", template=None) == ["<s>", "how", "many"]
    messages = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "how"})
    assert tokens_of(messages, template=None) == ["<s>", "be", "brief", "how"]


def test_the_template_can_be_left_out():
    assert tokens_of("how many", chat="off") == ["<s>", "how", "many"]


def test_a_tokenizer_that_ends_every_text_does_not_end_the_prompt():
    assert tokens_of("how many", chat="off", ends=True) == ["<s>", "how", "many"]


def test_a_missing_template_is_refused_where_one_is_asked_for():
    with pytest.raises(ConfigError, match="no chat template"):
        tokens_of("how", chat="on", template=None)


@pytest.mark.parametrize("tag", ["<|im_start|>", "[INST]", "<start_of_turn>"])
def test_a_row_with_chat_tags_of_its_own_is_refused(tag):
    with pytest.raises(DataError, match=r"rows.jsonl:7: the prompt already has the chat tag"):
        tokens_of(f"{tag}user how many")
    assert tokens_of(f"{tag} how", chat="off") == ["<s>", "<unk>", "how"]


def test_prompts_that_are_too_long_are_left_out_and_counted():
    asked = [row("how"), row("how many be brief"), row("many")]
    result = tokenized(asked, tokenizer(), max_prompt_tokens=4)
    assert len(result.rows) == 2
    assert result.num_too_long == 1


def test_no_prompt_that_fits_is_refused():
    with pytest.raises(ConfigError, match=r"no prompt has at most 2 tokens \(1 are longer\)"):
        tokenized([row("how many")], tokenizer(), max_prompt_tokens=2)
    with pytest.raises(ConfigError, match="no rows"):
        tokenized([], tokenizer())


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_no_tokens_is_not_no_limit(limit):
    with pytest.raises(ConfigError, match=f"no prompt has at most {limit} tokens"):
        tokenized([row("how many")], tokenizer(), max_prompt_tokens=limit)


def test_columns_of_the_users_own_reach_the_reward_whatever_they_are_called():
    values = {"place": "Paris", "prompt": "p", "prompt_end": "<think>", "end": 1, "question": "q"}
    (asked,) = rows({"text": "how", **values}, prompt_field="text")
    (only,) = tokenized([asked], tokenizer()).rows
    assert only.fields == values
    (prompt,) = PromptStream([only]).take(1)
    assert prompt.fields == values
    assert prompt.end == "<s><user> how <assistant>"
    assert not starts_in_thoughts(prompt)
    assert only.question == "how"


def test_a_prompt_that_the_template_refuses_is_named():
    strict = tokenizer(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"rows.jsonl:7: .* refuses .*roles must alternate"):
        rendered(row("how"), strict, chat="auto")


def test_the_question_is_what_the_user_says_last():
    begun = [{"role": "user", "content": "how"}, {"role": "assistant", "content": "<think>"}]
    (only,) = rows({"prompt": begun})
    assert only.text == "how"


def test_a_system_message_must_be_text():
    with pytest.raises(ConfigError, match="system must be UTF-8 text"):
        DataSettings(system="\udcff")


def test_the_reward_finds_the_prompt_and_its_place_among_the_fields():
    asked = Row(prompt="how", fields={"answer": 3}, place="rows.jsonl:7")
    (only,) = tokenized([asked], tokenizer()).rows
    assert only.fields == {
        "answer": 3,
        "prompt": "how",
        "prompt_end": "<s><user> how <assistant>",
        "place": "rows.jsonl:7",
    }
