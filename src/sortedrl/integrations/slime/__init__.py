"""slime with SortedRL's schedule: docs/how-to/slime.md.

`SortedDataSource` holds the scheduler and every sample that is not trained, with their checkpoint;
`generate_rollout` gives one update's samples.
Of SortedRL only the core is needed.
"""

try:
    from sortedrl.integrations.slime.rollout import SortedDataSource, generate_rollout
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"sortedrl.integrations.slime needs {error.name}; install slime from its repository, see "
        "docs/how-to/slime.md",
        name=error.name,
    ) from error

__all__ = ["SortedDataSource", "generate_rollout"]
