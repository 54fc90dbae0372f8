#!/usr/bin/env bash
# The paper's maths set-up in verl on eight H100: Qwen-2.5-32B learns DAPO-Math-17k with PPO and a
# critic, answers written by SGLang. Not run by us: the settings are checked against verl 0.9.1 by
# `make test-verl`.
#
# The data sets are published in verl's format, with the reward that verl knows by their name:
# BytedTsinghua-SIA/DAPO-Math-17k and BytedTsinghua-SIA/AIME-2024.
#
#   DATA=FOLDER bash experiments/paper/verl-maths.sh
#
# What the paper says: 512 prompts with one answer each, update batch 128, at most 8k tokens, 600
# updates. The learning rate is ours.
set -eu
export VERL_USE_EXTERNAL_MODULES=sortedrl.integrations.verl
DATA=${DATA:-.}

settings=(
    # SortedRL: groups of four update batches, interrupted answers are kept, one group ahead.
    trainer.v1.trainer_mode=sortedrl
    +trainer.v1.sortedrl.mode=partial
    +trainer.v1.sortedrl.group_prompts=512
    +trainer.v1.sortedrl.lookahead=1
    # Tokens of older weights are weighed against the policy that wrote them.
    actor_rollout_ref.rollout.calculate_log_probs=True
    algorithm.rollout_correction.bypass_mode=True

    data.train_files="$DATA/dapo-math-17k.parquet"
    data.val_files="$DATA/aime-2024.parquet"
    data.train_batch_size=128
    data.max_prompt_length=1024
    data.max_response_length=8192

    algorithm.adv_estimator=gae
    algorithm.gamma=1.0
    algorithm.lam=1.0
    actor_rollout_ref.model.path=Qwen/Qwen2.5-32B
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.actor.optim.lr=1e-6
    # A policy and a critic of 32.8 G parameters do not fit into eight GPUs: the host holds them.
    actor_rollout_ref.actor.fsdp_config.param_offload=True
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True

    critic.model.path=Qwen/Qwen2.5-32B
    critic.model.enable_gradient_checkpointing=True
    critic.ppo_mini_batch_size=128
    critic.use_dynamic_bsz=True
    critic.ppo_max_token_len_per_gpu=16384
    critic.fsdp.param_offload=True
    critic.fsdp.optimizer_offload=True

    actor_rollout_ref.rollout.name=sglang
    actor_rollout_ref.rollout.n=1
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.tensor_model_parallel_size=8
    actor_rollout_ref.rollout.max_num_seqs=128
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6

    trainer.n_gpus_per_node=8
    trainer.nnodes=1
    trainer.total_epochs=5
    trainer.total_training_steps=600
    trainer.test_freq=100
    trainer.save_freq=50
    trainer.project_name=sortedrl
    trainer.experiment_name=paper-maths
)
${PYTHON:-python} -m verl.trainer.main_ppo "${settings[@]}" "$@"
