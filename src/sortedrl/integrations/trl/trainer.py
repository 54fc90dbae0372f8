"""TRL's `GRPOTrainer` on SortedRL's schedule: we generate the answers, everything else is TRL's.

    TRL's loader     only counts the steps; prompts come from the same dataset, in our order
    _prepare_inputs  a generation batch is due: roll out until one is complete, and hand it over
    TRL              rewards, advantages, loss, optimiser step, logging; its passes are over answers
                     of about equal length, and no wider than the longest of them
    on_step_end      the batch is trained, the weights have changed
    checkpoint       buffer, journal and position in the data lie beside TRL's own files

Nothing of TRL is patched. A generation batch has exactly the size TRL plans its steps with, and
nothing is generated between two steps, so a checkpoint of TRL's is complete with our files in it.
With several ranks, each schedules every n-th prompt on its own copy of the model, and all of them
reach a batch of the same size.

With tools or an environment_factory an answer is a conversation, and slots belong to turns: see
`conversations`. TRL is given whole conversations, with the tokens of tools masked.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import parse_response

from sortedrl.config.checks import require
from sortedrl.config.parsing import toml_text
from sortedrl.config.schedule import EngineSettings, Schedule
from sortedrl.core.clock import WallClock
from sortedrl.core.files import write_whole
from sortedrl.core.randomness import mix
from sortedrl.engines.generation import RolloutEngine, run_to_end
from sortedrl.environments.adapters import is_declared_replayable
from sortedrl.errors import ConfigError
from sortedrl.integrations.trl.conversations import Conversation, ToolConversations, ToolRules
from sortedrl.integrations.trl.engines import EngineFactory, TrainerEngine
from sortedrl.integrations.trl.rollouts import (
    DatasetPrompts,
    RankPlace,
    Rollouts,
    Saved,
    identity_of,
)
from sortedrl.integrations.trl.settings import sampling_of, schedule_for
from sortedrl.types import Prompt, TrainBatch, Trajectory

_EVALUATION = 0x6576616C
_SUMMED = ("goodput", "throughput", "discarded_tokens")
_AVERAGED = ("bubble", "mean_staleness", "length_bias")
_LARGEST = ("max_staleness",)
_PROBED_ROWS = 8
"""Rows whose environments are reset to learn how long prompts are."""


class _OpenedAlready:
    """Takes the place of an environment whose conversation is over, where TRL would reset it."""

    def __init__(self, observation: str | None) -> None:
        self._observation = observation

    def reset(self, **row: object) -> str | None:
        """The text of the environment's own reset."""
        return self._observation


class _StepEnd(TrainerCallback):
    """Calls the trainer after TRL's optimiser step, before anything is logged or saved."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Called by transformers' trainer."""
        self._ended()


class SortedGRPOTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer` with answers from SortedRL's scheduler.

    `schedule` is a `Schedule`, or only the fields to set, such as `{"mode": "coupled"}`; its sizes
    follow from the `GRPOConfig`. The native engine generates with the weights that TRL trains, or
    TRL's vLLM server where `use_vllm` is set; `engine` makes another one on the model. `slots` are
    the answers that each process generates at once, by default as many as it trains per step.

    The methods of environments run in `tool_threads` threads, those of one object never at the
    same time. At most `max_open` conversations are begun at a time, which bounds the live
    environments; with as many as slots, a conversation keeps its slot while it waits for a tool.
    `is_replayable`: the same tool calls give the same results again; by default
    the attribute of the environments' classes.
    """

    _tag_names = ["trl", "grpo", "sortedrl"]  # noqa: RUF012  as TRL declares it
    environments: Any
    _buffered_inputs: Any
    _environment_pool: Any
    _batch_environments: Any

    def __init__(
        self,
        model: Any,  # noqa: ANN401  as TRL has it: a name, a PreTrainedModel or a PeftModel
        reward_funcs: Any = None,  # noqa: ANN401
        args: GRPOConfig | None = None,
        train_dataset: Any = None,  # noqa: ANN401
        eval_dataset: Any = None,  # noqa: ANN401
        processing_class: Any = None,  # noqa: ANN401
        reward_processing_classes: Any = None,  # noqa: ANN401
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,  # noqa: ANN401
        peft_config: Any = None,  # noqa: ANN401
        tools: Any = None,  # noqa: ANN401
        rollout_func: Any = None,  # noqa: ANN401
        environment_factory: Any = None,  # noqa: ANN401
        *,
        schedule: Schedule | Mapping[str, object] | None = None,
        engine: EngineFactory | None = None,
        slots: int | None = None,
        tool_threads: int = 16,
        max_open: int | None = None,
        is_replayable: bool | None = None,
    ) -> None:
        """Refuse what cannot work, then make TRL's trainer."""
        require(tool_threads >= 1, f"tool_threads must be at least 1, got {tool_threads}")
        require(max_open is None or max_open >= 1, f"max_open must be at least 1, got {max_open}")
        require(slots is None or slots >= 1, f"slots must be at least 1, got {slots}")
        require(
            engine is None or callable(engine),
            "engine must be a function that makes an engine on the model, such as lambda model: "
            f"NativeEngine(model, slots=64, cache_bytes=8 << 30), got {engine!r:.80}; leave it out "
            "for the native engine",
        )
        require(
            engine is None or args is None or not args.use_vllm,
            "engine and use_vllm both say what generates the answers; leave one of them out",
        )
        if rollout_func is not None:
            raise ConfigError(
                "rollout_func and SortedRL's scheduler both generate the answers; leave "
                "rollout_func out, or use TRL's GRPOTrainer"
            )
        if not isinstance(train_dataset, Dataset):
            raise ConfigError(
                "train_dataset must be a datasets.Dataset, whose rows can be looked up, got "
                f"{type(train_dataset).__name__}; load it without streaming"
            )
        require(
            environment_factory is not None or "prompt" in train_dataset.column_names,
            "train_dataset must have a column 'prompt', got "
            f"{', '.join(train_dataset.column_names)}; rename one with rename_column",
        )
        if slots is not None and (engine is not None or (args is not None and args.use_vllm)):
            raise ConfigError(
                "slots are those of the native engine; a vLLM server and an engine of your own "
                f"have theirs, so leave slots out, got {slots}"
            )
        if args is not None:
            schedule_for(schedule, args, world=args.world_size)
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            callbacks,
            optimizers,
            quantization_config,
            peft_config,
            tools,
            None,
            environment_factory,
        )
        self.schedule = schedule_for(schedule, self.args, world=self.args.world_size)
        self._refuse_setup()
        self._tool_threads = tool_threads
        self._max_open = max_open
        self._live: list[Conversation] = []
        self._conversations: ToolConversations | None = None
        self._is_replayable = (
            self._is_declared_replayable() if is_replayable is None else is_replayable
        )
        self._refuse_mode()
        sampling = sampling_of(self.args, stop_tokens=self.eos_token_ids)
        if self._has_conversations:
            sampling = replace(sampling, max_response_tokens=self.max_completion_length)
        self._engine = TrainerEngine(
            self,
            make=engine,
            slots=self.schedule.update_batch if slots is None else slots,
            sampling=sampling,
            schedule=self.schedule,
        )
        self._rollouts: Rollouts | None = None
        self._resume_from: Path | None = None
        self._batch = TrainBatch(0, ())
        self._rewards: list[float | None] = []
        self._passes = 0
        self._is_batch_cut = False
        self._eval_batches = 0
        self.add_callback(_StepEnd(self._step_ended))

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,  # noqa: ANN401
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:  # noqa: ANN401
        """Train; `True` resumes the newest complete checkpoint in `output_dir`."""
        place = self._place
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(place.newest_checkpoint())
        self._resume_from = Path(resume_from_checkpoint) if resume_from_checkpoint else None
        self._rollouts, self._buffered_inputs = None, None
        self._engine.weights_changed()
        try:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        finally:
            if self._rollouts is not None:
                self._rollouts.close()

    def evaluate(
        self,
        eval_dataset: Any = None,  # noqa: ANN401
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """TRL's evaluation with answers of our engine; every one draws from the same noise."""
        self._eval_batches = 0
        clock = self._rollouts.clock if self._rollouts is not None else WallClock()
        with clock.paused():
            metrics: dict[str, float] = super().evaluate(
                eval_dataset, ignore_keys, metric_key_prefix
            )
        return metrics

    # --- where TRL asks for answers ---------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> Any:  # noqa: ANN401
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        rollouts = self._rollouts or self._open_rollouts()
        every = self.args.steps_per_generation * self.num_iterations
        if self._step % every != 0 and self._buffered_inputs is not None:
            return super()._prepare_inputs(generation_batch)
        self._batch = rollouts.next_batch()
        if self._conversations is not None:
            self._live = self._conversations.live(self._batch.trajectories)
        rows = [rollouts.prompts.row_of(t.prompt) for t in self._batch.trajectories]
        inputs = super()._prepare_inputs(rows)
        if self._may_regroup:
            self._buffered_inputs = alike_in_length(self._buffered_inputs)
            inputs = self._buffered_inputs[self._step % len(self._buffered_inputs)]
        return inputs

    @property
    def _may_regroup(self) -> bool:
        """Whether the gradient of a step is the same however its answers are dealt to passes."""
        means_over_tokens_of_a_pass = self.loss_type == "bnpo" or self._entropy_bonus_enabled
        picks_tokens_of_a_pass = self.top_entropy_quantile < 1.0
        return not (means_over_tokens_of_a_pass or picks_tokens_of_a_pass or self.aux_loss_enabled)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,  # noqa: ANN401
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **options: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """TRL's, in passes of about equally long answers, each as wide as its longest one."""
        prompt = input_ids.size(1) - logits_to_keep
        lengths_B = attention_mask[:, prompt:].sum(dim=1)
        rows = batch_size or len(input_ids)
        order_B = lengths_B.argsort(descending=True, stable=True)
        if len(input_ids) <= rows:
            order_B = torch.arange(len(input_ids), device=order_B.device)
        results: list[list[torch.Tensor]] = [[], [], []]
        for chosen in order_B.split(rows):
            width = _rounded_up(max(1, int(lengths_B[chosen].max())), self.pad_to_multiple_of)
            width = min(width, logits_to_keep)
            logps_BT, entropies_BT, aux_loss = super()._get_per_token_logps_and_entropies(
                model,
                input_ids[chosen, : prompt + width],
                attention_mask[chosen, : prompt + width],
                width,
                **options,
            )
            for found, part in zip(results, (logps_BT, entropies_BT), strict=False):
                if part is not None:
                    found.append(torch.nn.functional.pad(part, (0, logits_to_keep - width)))
            if aux_loss is not None:
                results[2].append(aux_loss)
        back_B = order_B.argsort()
        logps, entropies, aux = results
        return (
            torch.cat(logps)[back_B],
            torch.cat(entropies)[back_B] if entropies else None,
            torch.stack(aux).mean() if aux else None,
        )

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,  # noqa: ANN401
        multimodal_fields: Any,  # noqa: ANN401
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float]]]:
        if self.model.training:
            answers: Sequence[Trajectory] = self._batch.trajectories
            require(
                [list(t.prompt.tokens) for t in answers] == list(map(list, prompt_ids)),
                "the same row must give the same prompt, but TRL made another one of it; reset() "
                "of an environment must return the same whenever it is given the same row",
            )
        else:
            answers = self._evaluated(prompt_ids)
        if self.model.training and self._conversations is not None:
            if self.environment_factories is not None:
                self.environments = [conversation.environment for conversation in self._live]
            # The first turns only: TRL parses them, and then asks for the rest.
            firsts = [conversation.turns[0] for conversation in self._live]
            pairs = zip(firsts, answers, strict=True)
            return firsts, [t.logprobs[: len(turn)] for turn, t in pairs]
        return [t.tokens for t in answers], [t.logprobs for t in answers]

    def _tool_call_loop(
        self,
        prompts: Any,  # noqa: ANN401
        prompt_ids: Any,  # noqa: ANN401
        completion_ids: Any,  # noqa: ANN401
        completions: Any,  # noqa: ANN401
        logprobs: Any,  # noqa: ANN401
        images: Any,  # noqa: ANN401
        multimodal_fields: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """The finished conversations; an evaluation is TRL's own loop on our engine."""
        if not self.model.training:
            return super()._tool_call_loop(
                prompts,
                prompt_ids,
                completion_ids,
                completions,
                logprobs,
                images,
                multimodal_fields,
            )
        answers, talks = self._batch.trajectories, self._live
        return (
            [t.loss_mask for t in answers],
            [list(conversation.messages) for conversation in talks],
            [t.response for t in answers],
            [_logprobs_of_all(t) for t in answers],
            sum(conversation.calls for conversation in talks),
            sum(conversation.failures for conversation in talks),
            [[] for _ in answers],
        )

    def _generate_and_score_completions(self, inputs: Any) -> Any:  # noqa: ANN401
        with self._opened_already(inputs):
            output = super()._generate_and_score_completions(inputs)
        # With vLLM, TRL corrects for the sampling log-probabilities itself.
        is_corrected = self.use_vllm and self.vllm_importance_sampling_correction
        is_stale = self.schedule.staleness_bound != 0 or self._is_batch_cut
        if self.model.training and is_stale and not is_corrected:
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        return output

    @contextmanager
    def _opened_already(self, inputs: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """Inside, TRL gets environments that repeat the text of their reset, and are not reset."""
        if not self.model.training or self.environment_factories is None:
            yield
            return
        own = self._environment_pool
        drawn: dict[str | None, list[_OpenedAlready]] = {name: [] for name in own}
        for row, conversation in zip(inputs, self._live, strict=True):
            drawn[self._environment_name(row)].append(_OpenedAlready(conversation.observation))
        self._environment_pool = drawn
        try:
            yield
        finally:
            self._environment_pool = own

    def _calculate_rewards(
        self,
        inputs: Any,  # noqa: ANN401
        prompts: Any,  # noqa: ANN401
        completions: Any,  # noqa: ANN401
        completion_ids_list: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        rewards_NF = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.model.training and self._rollouts is not None:
            first = self.accelerator.process_index * len(prompts)
            own_BF = rewards_NF[first : first + len(prompts)].cpu()
            total_B = (own_BF * self.reward_weights).nansum(dim=1)
            total_B[own_BF.isnan().all(dim=1)] = math.nan
            self._rewards = [value if math.isfinite(value) else None for value in total_B.tolist()]
            self._rollouts.scored(self._batch, self._rewards)
        return rewards_NF

    def _step_ended(self) -> None:
        """An optimiser step is done; after the last pass over a batch the batch is trained."""
        self._passes += 1
        if self._passes < self.num_iterations or self._rollouts is None:
            return
        self._passes, self._is_batch_cut = 0, False
        found = self._rollouts.trained(update=self.state.global_step, rewards=self._rewards)
        names = (*_SUMMED, *_AVERAGED, *_LARGEST)
        own = torch.tensor([found[name] for name in names], device=self.accelerator.device)
        all_RN = self.accelerator.gather(own.float()[None])
        for place, name in enumerate(names):
            of_ranks = all_RN[:, place]
            if name in _SUMMED:
                value = of_ranks.sum()
            else:
                value = of_ranks.max() if name in _LARGEST else of_ranks.nanmean()
            self._metrics["train"][f"sortedrl/{name}"].append(value.item())

    # --- beginning and resuming -------------------------------------------------------------------

    @property
    def _place(self) -> RankPlace:
        return RankPlace(
            folder=Path(self.args.output_dir),
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
        )

    def _open_rollouts(self) -> Rollouts:
        place, schedule, seed = self._place, self.schedule, self.args.seed
        batches, left = divmod(self.state.max_steps, self.num_iterations)
        require(
            left == 0,
            f"max_steps must be a multiple of num_iterations = {self.num_iterations}, got "
            f"{self.state.max_steps}; every generation batch is trained on that often",
        )
        self._open_conversations()
        prompts = DatasetPrompts(
            self.train_dataset,
            self._tokenized,
            total=batches * schedule.update_batch // schedule.samples_per_prompt,
            shuffle=self.shuffle_dataset,
            seed=seed,
            rank=place.rank,
            world=place.world,
        )
        saved = None
        if self._resume_from is not None:
            saved = Saved.read(place.state(self._resume_from))
            saved.refuse_others(identity_of(schedule, prompts, place, seed=seed))
            self._refuse_unreplayable(saved)
            prompts.position = saved.state["position"]
        place.folder.mkdir(parents=True, exist_ok=True)
        engine = self._opened_engine(prompts)
        # TRL counts its micro-steps from 0 again after a resume.
        self._step = self.state.global_step * self.args.gradient_accumulation_steps
        self._passes = self.state.global_step % self.num_iterations
        self._is_batch_cut = self._passes > 0
        self._rollouts = Rollouts(
            schedule=schedule,
            engine=engine,
            prompts=prompts,
            place=place,
            submit=self._engine.submit,
            sync=self._engine.sync,
            seed=seed,
            saved=saved,
            is_cut=self._is_batch_cut,
            conversations=self._conversations,
        )
        if place.rank == 0:
            self._write_config(place, engine)
        return self._rollouts

    def _write_config(self, place: RankPlace, engine: RolloutEngine) -> None:
        settings = EngineSettings(slots=engine.slots, max_tokens=self.max_completion_length)
        tables = {
            "seed": self.args.seed,
            "schedule": {k: v for k, v in asdict(self.schedule).items() if v is not None},
            "engine": asdict(settings),
        }
        write_whole(place.folder / "config.toml", toml_text(tables).encode())

    def _save_checkpoint(self, model: Any, trial: Any) -> None:  # noqa: ANN401
        if self._rollouts is not None and not self.args.save_only_model:
            folder = Path(self._get_output_dir(trial=trial))
            self._rollouts.save(folder / f"checkpoint-{self.state.global_step}")
            # TRL's trainer_state.json, written last, tells that the checkpoint is complete.
            self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)

    # --- the engine -------------------------------------------------------------------------------

    def _refuse_setup(self) -> None:
        if self._is_vlm:
            raise ConfigError(
                "SortedRL's engines generate from text alone; use TRL's GRPOTrainer for images"
            )
        if not self.use_vllm and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ConfigError(
                "the native engine needs the whole model in every process, which FSDP and "
                "DeepSpeed do not keep; use DDP, or use_vllm with vllm_mode='server'"
            )
        together = self.args.generation_batch_size // self.num_generations
        require(
            len(self.train_dataset) >= together,
            f"train_dataset must have at least the {together} prompts of one generation batch, "
            f"got {len(self.train_dataset)}; lower the batch size",
        )

    # --- conversations ----------------------------------------------------------------------------

    @property
    def _has_conversations(self) -> bool:
        return bool(self.tools) or self.environment_factories is not None

    def _is_declared_replayable(self) -> bool:
        """Whether all environments declare it; tools without an environment cannot."""
        if self.environment_factories is None:
            return False
        probes = [instances[0] for instances in self._environment_pool.values()]
        return not self._standalone_tools and all(map(is_declared_replayable, probes))

    def _refuse_mode(self) -> None:
        schedule = self.schedule
        require(
            not self._has_conversations
            or self._is_replayable
            or schedule.mode != "coupled"
            or schedule.never_interrupts,
            "mode 'coupled' verifies turns and makes their tool calls again, but the environments "
            "are not declared replayable; set is_replayable = True on their classes (or "
            "is_replayable=True here) if the same calls give the same results, or set mode "
            "'partial', 'redraw' or 'on_policy'",
        )

    def _refuse_unreplayable(self, saved: Saved) -> None:
        """Refuse conversations in progress that cannot be replayed."""
        if not self._has_conversations or self._is_replayable:
            return
        state = saved.buffer.state()
        begun = [*state.returned, *state.ready, *state.outside]
        count = sum(bool(trajectory.segments) for trajectory in begun)
        require(
            count == 0,
            f"{saved.path.parent.parent} holds {count} conversations whose environments are gone, "
            "and they are not replayable; set is_replayable if the same tool calls give the same "
            "results, or start a new run with this checkpoint as the model",
        )

    def _environment_name(self, row: Mapping[str, Any]) -> str | None:
        return row.get("environment") if self._multi_environment else None

    def _open_conversations(self) -> None:
        if not self._has_conversations:
            return
        config = self.model.config.get_text_config()
        self._conversations = ToolConversations(
            ToolRules(
                parse=self._parsed_turn,
                suffix=self._get_tool_suffix_ids,
                run_async=self._run_async,
                max_iterations=min(self.max_tool_calling_iterations, sys.maxsize),
                max_response_tokens=self.max_completion_length,
                max_context=config.max_position_embeddings,
                stop_tokens=frozenset(self.eos_token_ids),
            ),
            factories=self.environment_factories,
            tools=self._standalone_tools,
            row_of=lambda prompt: dict(self.train_dataset[prompt.fields["row"]]),
            threads=self._tool_threads,
            limit=self._max_open,
            is_replayable=self._is_replayable,
        )

    def _parsed_turn(
        self, tokens: list[int], before: list[int], name: str | None
    ) -> dict[str, Any]:
        tools = self.tools if self.environment_factories is None else self._env_tools[name]
        message: dict[str, Any] = parse_response(
            self._tokenizer, tokens, prefix=before, tools=tools
        )
        return message

    def _run_async(self, coroutine: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401
        return asyncio.run_coroutine_threadsafe(coroutine, self.async_loop).result()

    def _tokenized(self, rows: list[Mapping[str, Any]]) -> Sequence[Sequence[int]]:
        if self._has_conversations and self._conversations is None:
            self._open_conversations()
        conversation = self._conversations
        prompts = [
            row["prompt"] if conversation is None else conversation.prompt_of(row) for row in rows
        ]
        if self.environment_factories is not None:
            self._batch_environments = [self._environment_name(row) for row in rows]
        ids, _, _ = self._tokenize_prompts(prompts)
        tokens: Sequence[Sequence[int]] = ids
        return tokens

    def _opened_engine(self, prompts: DatasetPrompts) -> RolloutEngine:
        sampled = {} if self.environment_factories is None else {"sampled_rows": _PROBED_ROWS}
        return self._engine.opened(lambda: prompts.longest(**sampled))

    def _evaluated(self, prompt_ids: Sequence[Sequence[int]]) -> list[Trajectory]:
        """Complete answers to the prompts of one evaluation batch."""
        rows = DatasetPrompts(
            self.train_dataset, self._tokenized, total=0, shuffle=False, seed=self.args.seed
        )
        drawn = self._batch_environments if self.environment_factories is not None else []
        engine = self._opened_engine(rows)
        self._batch_environments = drawn  # an engine that is opened here has probed other rows
        version = 0 if self._rollouts is None else self._rollouts.scheduler.version
        self._engine.sync(version)
        number, self._eval_batches = self._eval_batches, self._eval_batches + 1
        key = (self.args.seed, _EVALUATION, self.accelerator.process_index, number)
        fresh = [
            Trajectory(
                prompt=Prompt(id=index, tokens=tuple(tokens)),
                sample_index=0,
                group=0,
                seed=mix(*key, index),
            )
            for index, tokens in enumerate(prompt_ids)
        ]
        self._engine.submit(fresh, None)
        return run_to_end(engine, [t.key for t in fresh], show_progress=False)


def alike_in_length(passes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The answers of one optimiser step, dealt to its passes by length, the longest ones first."""
    lengths_B = torch.cat([inputs["completion_mask"].sum(dim=1) for inputs in passes])
    chosen_by_pass = lengths_B.argsort(descending=True, stable=True).chunk(len(passes))
    rows = {
        name: torch.cat([inputs[name] for inputs in passes])
        for name, value in passes[0].items()
        if value is not None and value.ndim > 0
    }
    return [
        {**passes[0], **{name: value[chosen] for name, value in rows.items()}}
        for chosen in chosen_by_pass
    ]


def _rounded_up(number: int, multiple: int | None) -> int:
    return number if multiple is None else -(-number // multiple) * multiple


def _logprobs_of_all(trajectory: Trajectory) -> list[float]:
    """For each token after the prompt its log-probability, and 0 for those of tools, as in TRL."""
    written = iter(trajectory.logprobs)
    return [next(written) if is_written else 0.0 for is_written in trajectory.loss_mask]
