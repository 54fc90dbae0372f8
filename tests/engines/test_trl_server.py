"""TRL's GRPO with our schedule on a real vLLM server.

TRL sends weights over NCCL, which needs a GPU; here the same tensors, which TRL walks through for
every update, go through a file. Everything else of TRL's client and of the server is real.
"""

import asyncio
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")
if find_spec("vllm") is None:
    pytest.skip("needs vllm, in a venv of its own", allow_module_level=True)

from datasets import Dataset
from served import vllm_servers
from trl import GRPOConfig
from trl.generation.vllm_client import VLLMClient

from sortedrl.core.events import Update, read_events
from sortedrl.engines.streaming.backend import ServerRequirements
from sortedrl.engines.vllm.vllm_server import VllmServer
from sortedrl.errors import ConfigError
from sortedrl.integrations.trl import SortedGRPOTrainer
from sortedrl.models.tiny import TinySettings, tiny_model, tiny_tokenizer
from sortedrl.types import Weights

pytestmark = pytest.mark.filterwarnings("default")
ROWS, SAMPLES, BATCH, TOKENS, CONTEXT, SLOTS = 8, 2, 4, 24, 64, 4
STOPS = list(range(0, 256, 11))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A vLLM server on the CPU, with a tiny model."""
    folder = tmp_path_factory.mktemp("served")
    model = tiny_model(TinySettings(hidden=64, layers=1, heads=2))
    model.generation_config.eos_token_id = STOPS
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    with vllm_servers(folder, count=1, slots=SLOTS, context=CONTEXT) as (one,):
        yield folder, one.url


@pytest.fixture
def sent(monkeypatch, tmp_path):
    """How many times TRL sent its weights; they go through a file instead of NCCL."""
    updates = []

    def send(client, metadata, named):
        tensors = {name: tensor.detach().clone() for name, tensor in named}
        assert [name for name, _, _ in metadata] == list(tensors)
        updates.append(len(tensors))
        asyncio.run(_load(client.base_url, tensors, tmp_path / "sent"))

    monkeypatch.setattr(VLLMClient, "init_communicator", lambda client, device: None)
    monkeypatch.setattr(VLLMClient, "update_named_params", send)
    return updates


async def _load(url, tensors, folder: Path):
    vocabulary = tensors["model.embed_tokens.weight"].shape[0]
    required = ServerRequirements(vocabulary=vocabulary, context=CONTEXT, temperature=1.0)
    server = await VllmServer.connect(url, required, weights_folder=folder)
    await server.load_weights(Weights(0, tensors))
    await server.close()


class Watched(SortedGRPOTrainer):
    """Keeps the gap between the server's log-probabilities and TRL's own, token by token."""

    gaps = ()
    rows = ()

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        with torch.no_grad():
            own, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([output["prompt_ids"], output["completion_ids"]], 1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], 1),
                output["completion_ids"].size(1),
            )
        gap = (own - output["sampling_per_token_logps"]).abs() * output["completion_mask"]
        self.gaps = (*self.gaps, gap.max().item())
        self.rows = (*self.rows, *(row["row"] for row in inputs))
        return output


def trainer_at(url, folder, out, mode):
    return Watched(
        model=str(folder),
        processing_class=tiny_tokenizer(),
        reward_funcs=lambda completion_ids, **columns: [float(len(ids)) for ids in completion_ids],
        args=GRPOConfig(
            output_dir=str(out),
            per_device_train_batch_size=BATCH,
            num_generations=SAMPLES,
            max_completion_length=TOKENS,
            learning_rate=1e-2,
            num_train_epochs=2,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{n}: ", "row": n} for n in range(ROWS)]),
        schedule={"mode": mode},
    )


@pytest.mark.parametrize("mode", ["on_policy", "partial"])
def test_answers_come_from_a_vllm_server_that_has_trls_weights(served, sent, tmp_path, mode):
    folder, url = served
    trainer = trainer_at(url, folder, tmp_path / "out", mode)
    trainer.train()

    updates = 2 * ROWS * SAMPLES // BATCH
    assert len(trainer.gaps) == updates
    assert Counter(trainer.rows) == {row: 2 * SAMPLES for row in range(ROWS)}
    assert len(sent) == updates, "the weights are sent once for every update"
    events = list(read_events(tmp_path / "out" / "events.jsonl"))
    trained = [t for event in events if isinstance(event, Update) for t in event.trained]
    assert len(trained) == 2 * ROWS * SAMPLES
    if mode == "on_policy":
        assert max(trainer.gaps) < 1e-3, "every token is of the weights that are trained"
    else:
        assert min(trainer.gaps) < 1e-3, "the first batch of a round is fresh"


@pytest.mark.parametrize("mode", ["coupled", "redraw"])
def test_modes_that_need_noise_with_a_seed_are_refused_on_a_server(served, sent, tmp_path, mode):
    folder, url = served
    with pytest.raises(ConfigError, match="native engine"):
        trainer_at(url, folder, tmp_path / "out", mode).train()
