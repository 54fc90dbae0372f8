"""verl's V1 trainer with SortedRL's schedule: docs/how-to/verl.md.

settings        verl's configuration -> the schedule; refuses what cannot work
replay_buffer   which prompts are trained next, and which are generated again
trainer         `SortedTrainer`, registered as trainer mode `sortedrl`, with the client and the
                agent loop of the on-policy modes

verl imports this package in every process that has VERL_USE_EXTERNAL_MODULES set to its name.
Of SortedRL only the core is needed.
"""

try:
    from sortedrl.integrations.verl.trainer import SortedTrainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"sortedrl.integrations.verl needs {error.name}; install verl with its engine, see "
        "docs/how-to/verl.md",
        name=error.name,
    ) from error

__all__ = ["SortedTrainer"]
