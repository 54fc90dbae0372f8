"""Station 5: from answers to rewards, in worker processes beside the rollout."""
