"""One verl run with our trainer mode: configuration, data, and what was trained."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray
import transfer_queue as tq
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.experimental.reward_loop import RewardLoopManager
from verl.trainer.ppo.v1 import AgentLoopManagerTQ

from sortedrl.integrations.verl import SortedTrainer
from verl_run.model import write_model
from verl_run.servers import FakeServers


def write_data(path: Path, rows: int) -> Path:
    """Prompts with a number, in verl's columns."""
    table = [
        {
            "prompt": [{"role": "user", "content": f"w{n % 50}"}],
            "data_source": "test",
            "reward_model": {"style": "rule", "ground_truth": str(n)},
            "extra_info": {"index": n},
        }
        for n in range(rows)
    ]
    pq.write_table(pa.Table.from_pylist(table), path)
    return path


def verl_config(*overrides: str) -> Any:
    """verl's own PPO configuration with overrides, as its command line makes it."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


def run_config(folder: Path, *, rows: int, reward: Path | None = None, extra: list[str]) -> Any:
    """A small run in `folder`."""
    model, data = write_model(folder / "model"), write_data(folder / "rows.parquet", rows)
    config = verl_config(
        f"data.train_files={data}",
        f"data.val_files={data}",
        "data.train_batch_size=4",
        "data.dataloader_num_workers=0",
        "data.shuffle=True",
        "data.seed=3",
        "data.max_prompt_length=16",
        "data.max_response_length=64",
        "data.filter_overlong_prompts=False",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "actor_rollout_ref.rollout.agent.default_agent_loop=sortedrl",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.bypass_mode=True",
        "actor_rollout_ref.actor.use_kl_loss=False",
        f"reward.custom_reward_function.path={reward or write_reward(folder)}",
        "reward.num_workers=1",
        "trainer.logger=[console]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.device=cpu",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        "trainer.v1.trainer_mode=sortedrl",
        *extra,
    )
    config.transfer_queue.enable = True
    OmegaConf.resolve(config)
    return config


def write_reward(folder: Path) -> Path:
    """A reward function that measures lengths around one that counts letters."""
    path = folder / "reward.py"
    path.write_text(
        "import sortedrl\n"
        "def letters(data_source, solution_str, ground_truth, extra_info=None, **more):\n"
        "    return float(len(solution_str))\n"
        f"compute_score = sortedrl.measure({str(folder / 'lengths.jsonl')!r}, letters)\n"
    )
    return path


class NoWorkers:
    """A worker group without GPUs: a checkpoint is an empty folder."""

    def save_checkpoint(self, path: str, *_: object, **__: object) -> None:
        """Make the folder."""
        Path(path).mkdir(parents=True, exist_ok=True)

    def load_checkpoint(self, **_: object) -> None:
        """Nothing to load."""


class RecordingTrainer(SortedTrainer):
    """Our trainer with stand-ins for what needs a GPU; keeps what it was given to train on."""

    def use(self, stage: "Stage") -> None:
        """Take the processes of the stage."""
        self._stage = stage
        self.trained: list[list[dict[str, Any]]] = []
        self.logged: list[dict[str, Any]] = []
        self.stop_after: int | None = None
        self.kill_worker_at: tuple[str, int] | None = None
        self.replay_buffer.poll_interval = 0.1

    def prepare_step(self) -> dict[str, float]:
        """Where the test kills a worker that prompts are then submitted to, if it does."""
        self._kill_worker("prepare_step")
        return super().prepare_step()

    def on_sample_begin(self) -> None:
        """Where the test kills a worker that is then waited for, if it does."""
        self._kill_worker("on_sample_begin")

    def _kill_worker(self, place: str) -> None:
        if self.kill_worker_at == (place, self.global_steps):
            ray.kill(self.agent_loop_manager.agent_loop_workers[0])

    def _setup(self) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self.actor_rollout_wg = NoWorkers()
        self.llm_server_manager = self.checkpoint_manager = self._stage.servers
        self.reward_loop_manager = self._stage.rewards(self.config)
        self._load_checkpoint()

    def _balance_batch(self, batch: Any, metrics: Any) -> Any:
        return batch

    def _compute_old_log_prob(self, batch: Any, metrics: Any) -> Any:
        return batch

    def _compute_advantage(self, batch: Any, metrics: Any) -> Any:
        return batch

    def _update_actor(self, batch: Any, metrics: Any) -> Any:
        fields = tq.kv_batch_get(
            keys=batch.keys,
            partition_id="train",
            select_fields=["responses", "index", "session_id", "rm_scores"],
        )
        self.trained.append(
            [
                {
                    "row": int(fields["index"][place]),
                    "session": int(fields["session_id"][place]),
                    "uid": key.split("_")[0],
                    "tokens": fields["responses"][place].tolist(),
                    "reward": float(fields["rm_scores"][place].sum()),
                    "staleness": self.global_steps - 1 - tag["min_global_steps"],
                }
                for place, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True))
            ]
        )
        return batch

    def _compute_metrics(self, batch: Any, metrics: Any, *_: object, **__: object) -> None:
        self.logged.append(dict(metrics))
        if self.stop_after == self.global_steps:
            raise Killed


class Killed(Exception):
    """The run is over in the middle of its work."""


class Stage:
    """The processes that runs share, because each takes ten seconds to import verl."""

    def __init__(self) -> None:
        """Start the server; the others start with the first run."""
        self.servers = FakeServers()
        self._rewards: RewardLoopManager | None = None
        self._managers: dict[str, Any] = {}

    def rewards(self, config: Any) -> RewardLoopManager:
        """verl's reward workers, with the reward of the first run."""
        if self._rewards is None:
            self._rewards = RewardLoopManager(config=config)
        return self._rewards

    def run(
        self,
        config: Any,
        *,
        stop_after: int | None = None,
        kill_worker_at: tuple[str, int] | None = None,
        fail_first: int = 0,
    ) -> RecordingTrainer:
        """Train to the end, or until step `stop_after` is saved."""
        self.servers.config = config
        trainer = RecordingTrainer(config)
        trainer.use(self)
        trainer.stop_after, trainer.kill_worker_at = stop_after, kill_worker_at
        trainer.init()
        ray.get([self.servers.server.fail.remote(fail_first), self.servers.server.resume.remote()])
        mode = trainer.schedule.mode
        if mode not in self._managers:
            self._managers[mode] = AgentLoopManagerTQ.create(
                config=config,
                llm_client=trainer.get_llm_client(),
                teacher_client=None,
                reward_loop_worker_handles=trainer.get_reward_handles(),
            )
        try:
            trainer.fit(self._managers[mode])
        except BaseException as error:
            # Its workers go on with prompts that nobody waits for.
            for worker in self._managers.pop(mode).agent_loop_workers:
                ray.kill(worker)
            if not isinstance(error, Killed):
                raise
        finally:
            forget_prompts()
        return trainer


def forget_prompts() -> None:
    """Empty the queue, as it is in a process that starts."""
    for partition, tags in (tq.kv_list() or {}).items():
        if tags:
            tq.kv_clear(keys=list(tags), partition_id=partition)
