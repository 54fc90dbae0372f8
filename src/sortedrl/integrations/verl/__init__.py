"""verl's V1 trainer with SortedRL's schedule: docs/how-to/verl.md.

`SortedTrainer` is registered as trainer mode `sortedrl`.
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
