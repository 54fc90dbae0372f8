"""The paper's own two set-ups: each config passes the real dry run, without a hub."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig, Qwen2Config

from experiments import paper
from experiments.record import Results
from experiments.trials import Setup
from run_worlds import said
from sortedrl.config.parsing import parsed, read_toml
from sortedrl.config.schedule import EngineSettings
from sortedrl.data.catalogue import TASKS
from sortedrl.models.shape import KNOWN_SHAPES, shape_of_config

CONFIGS = sorted(paper.FOLDER.glob("*.toml"))
TABLE = read_toml(paper.ROOT / "experiments" / "paper.toml")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No name is looked up: a dry run of a known model waits for nobody."""

    def refuse(host, *more, **named):
        pytest.fail(f"the network was asked for {host}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def dry_run(capsys, config, *words):
    command = ["train", config, "--dry-run", "--card", "h100", "--json", *words]
    out, err = said(capsys, command)
    assert "its sizes are taken from a list of public models, not from its config" in err
    return json.loads(out)


def test_there_are_four_configs_and_the_table_has_them_all():
    names = {f"{task}-{engine}" for task in ("logic", "maths") for engine in ("sglang", "vllm")}
    assert {path.stem for path in CONFIGS} == set(TABLE["setups"]) == names


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_logic_set_up_passes_the_dry_run(capsys, engine):
    config = paper.FOLDER / f"logic-{engine}.toml"
    plan = dry_run(capsys, config, "--rows", "4500", "--prompt-tokens", "256")
    found = plan["prediction"]
    assert plan["fits"]
    assert plan["demand"]["shape"]["parameters"] == 8_030_261_248
    assert plan["demand"]["cluster"]["trainer_ranks"] == 8
    assert found["schedule"]["prompts"] == 4 * 4500
    assert found["slots"] == 1024
    assert found["bubble"] < 0.2 < 0.5 < found["sync_bubble"]
    assert found["hours"] < found["sync_hours"]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_maths_set_up_passes_the_dry_run(capsys, engine):
    config = paper.FOLDER / f"maths-{engine}.toml"
    plan = dry_run(capsys, config, "--rows", "17398", "--prompt-tokens", "256")
    found = plan["prediction"]
    assert plan["fits"]
    assert plan["demand"]["shape"]["parameters"] == 32_763_876_352
    assert plan["demand"]["has_critic"]
    # Masters and two moments of policy and critic, in fp32; the critic has no output layer.
    assert 0.97 < plan["memory"]["host"] / (2 * 12 * 32_763_876_352) < 1
    assert found["schedule"]["updates"] == 600
    assert found["bubble"] < 0.2 < 0.5 < found["sync_bubble"]
    assert found["goodput"] > 2 * found["sync_goodput"]


@pytest.mark.parametrize("setup", ["logic", "maths"])
def test_the_variants_of_a_set_up_differ_in_their_engine_alone(setup):
    one, other = (
        paper.settings_of(paper.FOLDER / f"{setup}-{engine}.toml") for engine in ("sglang", "vllm")
    )
    assert (one.rollout.engine, other.rollout.engine) == ("sglang", "vllm")
    assert one == replace(other, rollout=one.rollout, out=one.out)


def test_the_set_ups_are_those_of_the_paper():
    logic, maths = (
        paper.settings_of(paper.FOLDER / f"{setup}-vllm.toml") for setup in ("logic", "maths")
    )
    assert logic.algorithm.name == "reinforce_pp"
    assert (logic.schedule.samples_per_prompt, logic.schedule.update_batch) == (8, 1024)
    assert logic.schedule.group_prompts % 128 == 0
    puzzles = {"people": "3-7", "count": "4500"}
    assert parsed(logic.task) == ("knights_knaves", puzzles)
    (test,) = logic.evaluation.tasks
    assert parsed(test) == ("knights_knaves", puzzles | {"count": "500", "split": "test"})
    assert maths.algorithm.has_critic
    assert (maths.schedule.group_prompts, maths.schedule.samples_per_prompt) == (512, 1)
    assert maths.schedule.update_batch == 128
    assert maths.engine == EngineSettings(slots=128, max_tokens=8192)
    held_out = [parsed(task)[0] for task in maths.evaluation.tasks]
    assert {*held_out} == {"gsm8k", "math500", "minerva", "olympiadbench", "aime24", "amc23"}
    assert {*held_out} <= set(TASKS)
    for config in CONFIGS:
        other = replace(
            paper.settings_of(config), schedule=replace(logic.schedule, mode="on_policy")
        )
        assert other.schedule.staleness_bound == 0


def test_a_row_of_the_table_says_what_its_command_prints(capsys, tmp_path):
    setup = Setup(
        table="paper",
        device="cpu",
        is_small=False,
        settings=TABLE,
        results=Results(tmp_path),
        scratch=tmp_path,
    )
    trials = {trial.name: trial for trial in paper.trials(setup)}
    row = trials["maths-vllm"].run()
    assert row["is_prediction"]
    words = row["command"].split()
    config = Path(paper.ROOT, words[2])
    plan = dry_run(capsys, config, *words[words.index("--rows") :])
    assert words[3:6] == ["--dry-run", "--card", "h100"]
    assert row["hours"] == round(plan["prediction"]["hours"], 2)
    assert row["bubble"] == round(plan["prediction"]["bubble"], 4)
    assert row["goodput_ratio"] == pytest.approx(row["goodput"] / row["sync_goodput"], rel=0.01)
    assert row["least_gib_per_gpu"] <= row["gib_per_gpu"] <= row["usable_gib_per_gpu"] < 80


def test_data_out_of_reach_is_refused_with_the_way_round_it(capsys, tmp_path):
    words = ["train", "--task", str(tmp_path / "none.jsonl"), "--reward", "maths", "--dry-run"]
    _, err = said(capsys, words, code=2)
    assert "--rows 17000" in err
    assert "--prompt-tokens 200" in err
    out, err = said(capsys, [*words, "--rows", "600", "--json"])
    assert json.loads(out)["prediction"]["schedule"]["prompts"] == 600
    assert "prompts are taken to have 256 tokens; give their length with --prompt-tokens" in err
    out, err = said(capsys, [*words, "--rows", "600", "--prompt-tokens", "99", "--json"])
    assert json.loads(out)["demand"]["prompt_tokens"] == 99
    assert "prompts are taken" not in err
    _, err = said(capsys, [*words, "--rows", "0"], code=2)
    assert "--rows must be at least 1, got 0" in err
    _, err = said(capsys, [*words, "--rows", "600", "--prompt-tokens", "0"], code=2)
    assert "--prompt-tokens must be at least 1, got 0" in err


@pytest.mark.parametrize("name", KNOWN_SHAPES)
def test_the_known_shapes_are_those_that_their_configs_describe(name):
    shape = KNOWN_SHAPES[name]
    kind = LlamaConfig if "Llama" in name else Qwen2Config
    config = kind(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=shape.is_tied,
    )
    assert shape_of_config(config, name=name) == shape


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-32B", 32_763_876_352),
    ],
)
def test_the_known_shapes_have_the_published_number_of_parameters(name, parameters):
    assert KNOWN_SHAPES[name].parameters == parameters


def test_a_config_on_this_machine_goes_before_the_list(capsys, tmp_path, monkeypatch):
    name = "Qwen/Qwen2.5-1.5B"
    config = Qwen2Config(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config.save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    words = ["train", "--model", name, "--dry-run", "--json"]
    out, err = said(capsys, [*words, "--rows", "600", "--prompt-tokens", "9"])
    assert json.loads(out)["demand"]["shape"]["layers"] == 3
    assert "list of public models" not in err
