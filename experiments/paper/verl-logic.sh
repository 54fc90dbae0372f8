#!/usr/bin/env bash
# The paper's logic set-up in verl on eight H100: LLaMA-3.1-8B-Instruct learns Knights and Knaves
# with REINFORCE++, answers written by SGLang. Not run by us: the settings are checked against
# verl 0.9.1 by `make test-verl`.
#
#   for split in train test; do
#     sortedrl data generate knights_knaves:people=3-7,count=4500,split=$split --out $split.jsonl
#     python experiments/paper/verl_logic.py $split.jsonl $split.parquet
#   done
#   DATA=. bash experiments/paper/verl-logic.sh
#
# What the paper says: 128 prompts x 8 answers, update batch 1,024. Its lengths, epochs and learning
# rate are not in our notes: those below are ours. verl waits for all eight answers to a prompt.
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

    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=128
    data.max_prompt_length=1024
    data.max_response_length=4096
    reward.custom_reward_function.path=experiments/paper/verl_logic.py

    algorithm.adv_estimator=reinforce_plus_plus
    actor_rollout_ref.model.path=meta-llama/Llama-3.1-8B-Instruct
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.actor.optim.lr=1e-6

    actor_rollout_ref.rollout.name=sglang
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.max_num_seqs=128
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7

    trainer.n_gpus_per_node=8
    trainer.nnodes=1
    trainer.total_epochs=4
    trainer.test_freq=10
    trainer.save_freq=10
    trainer.project_name=sortedrl
    trainer.experiment_name=paper-logic
)
${PYTHON:-python} -m verl.trainer.main_ppo "${settings[@]}" "$@"
