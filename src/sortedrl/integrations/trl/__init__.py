"""TRL's `GRPOTrainer` with answers from SortedRL's scheduler: docs/how-to/trl.md.

settings   TRL's arguments -> schedule and sampling; refuses what cannot work
prompts    dataset -> prompts, shared out over the ranks
engines    the native engine on TRL's model, or TRL's vLLM server
rollouts   one rank's scheduler with engine, logs and checkpoint
trainer    `SortedGRPOTrainer`: where TRL calls them
"""

try:
    from sortedrl.integrations.trl.trainer import SortedGRPOTrainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"SortedGRPOTrainer needs {error.name}; pip install 'sortedrl[trl]'", name=error.name
    ) from error

__all__ = ["SortedGRPOTrainer"]
