"""slime's arguments for a small run, and its loop without training."""

import json
from argparse import Namespace
from pathlib import Path

from slime.utils.http_utils import init_http_client
from slime.utils.misc import SingletonMeta

import sortedrl
from slime_run.router import Router
from sortedrl.integrations.slime import SortedDataSource, generate_rollout
from verl_run.model import write_model

ROWS, BATCH, SAMPLES = 16, 4, 2


async def reward(args, sample, **_):
    """The number of tokens."""
    return float(sample.response_length)


_measures = [reward]


async def measured(*given, **named):
    """The reward that `measure_in` made last: slime loads an address only once."""
    return await _measures[-1](*given, **named)


def measure_in(path: Path) -> str:
    """The address of a reward that also notes lengths."""
    _measures.append(sortedrl.measure(path, reward))
    return "slime_run.run.measured"


def arguments(folder: Path, router: Router, **changed) -> Namespace:
    """The arguments that slime's rollout side reads."""
    SingletonMeta._instances.clear()
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"w{n} <start>"}) + "\n" for n in range(ROWS)))
    values = {
        "hf_checkpoint": str(write_model(folder / "model")),
        "prompt_data": str(rows),
        "input_key": "text",
        "label_key": None,
        "metadata_key": "metadata",
        "tool_key": None,
        "multimodal_keys": None,
        "apply_chat_template": False,
        "apply_chat_template_kwargs": None,
        "rollout_global_dataset": True,
        "rollout_shuffle": True,
        "rollout_seed": 5,
        "rollout_batch_size": BATCH,
        "n_samples_per_prompt": SAMPLES,
        "num_rollout": None,
        "num_epoch": 2,
        "rollout_max_prompt_len": None,
        "rollout_max_response_len": 64,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_stop": None,
        "rollout_stop_token_ids": None,
        "rollout_skip_special_tokens": False,
        "rollout_num_engines": 1,
        "sglang_server_concurrency": 6,
        "sglang_dp_size": None,
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": router.port,
        "sglang_enable_deterministic_inference": False,
        "sglang_speculative_algorithm": None,
        "use_distributed_post": False,
        "use_rollout_routing_replay": False,
        "use_rollout_logprobs": True,
        "use_tis": False,
        "partial_rollout": False,
        "mask_offpolicy_in_partial_rollout": False,
        "custom_generate_function_path": None,
        "custom_rm_path": "slime_run.run.reward",
        "rm_type": None,
        "rm_url": None,
        "group_rm": False,
        "reward_key": None,
        "eval_reward_key": None,
        "dynamic_sampling_filter_path": None,
        "rollout_sample_filter_path": None,
        "rollout_all_samples_process_path": None,
        "buffer_filter_path": None,
        "dump_details": None,
        "ci_test": False,
        "save": str(folder / "save"),
        "load": None,
        "sortedrl_group_prompts": 2 * BATCH,
        **changed,
    }
    args = Namespace(**values)
    init_http_client(args)
    return args


def rollouts(source: SortedDataSource, args: Namespace, router: Router, numbers: range):
    """The groups of each update, as slime's training loop asks for them."""
    found = []
    for number in numbers:
        router.version = number
        output = generate_rollout(args, number, source)
        found.append(output)
    return found
