"""TRL's `GRPOTrainer` with answers from SortedRL's scheduler: docs/how-to/trl.md.

settings       TRL's arguments -> schedule and sampling; refuses what cannot work
engines        the native engine on TRL's model, or TRL's vLLM server
conversations  TRL's environments and tools, without its lock step
rollouts       one rank's scheduler with prompts, engine, logs and checkpoint
trainer        `SortedGRPOTrainer`: where TRL calls them
"""

try:
    from sortedrl.integrations.trl.trainer import SortedGRPOTrainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"SortedGRPOTrainer needs {error.name}; pip install 'sortedrl[trl]'", name=error.name
    ) from error

__all__ = ["SortedGRPOTrainer"]
