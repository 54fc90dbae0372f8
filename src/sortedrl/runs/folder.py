"""The folder of a run: what lies where, and which settings it was begun with.

config.toml       every setting, as resolved
events.jsonl      everything that happened
metrics.jsonl     one line of numbers for each update
answers.jsonl     some answers of each update, as text
checkpoints/      the last complete ones, and the best
logs/             what the workers of a cluster say
tensorboard/      the same numbers as curves, where that is asked for
model/            the trained model, as transformers reads it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sortedrl.errors import ConfigError, DataError
from sortedrl.whole_file import write_whole

_MAY_CHANGE = (
    "out",
    "epochs",
    "max_updates",
    "device",
    "folder",
    "cluster",
    "rewards",
    "evaluation",
    "saving",
    "tracking",
)
"""Settings that a resumed run may have others of.

What was trained stands; a cosine learning rate is stretched to the new `epochs` and `max_updates`.
"""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The places in a run's folder."""

    root: Path

    @property
    def config(self) -> Path:
        """Every setting, as resolved."""
        return self.root / "config.toml"

    @property
    def events(self) -> Path:
        """Everything that happened."""
        return self.root / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """One line of numbers for each update."""
        return self.root / "metrics.jsonl"

    @property
    def answers(self) -> Path:
        """Some answers of each update, as text."""
        return self.root / "answers.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The last complete checkpoints, and the best."""
        return self.root / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """The numbers as curves."""
        return self.root / "tensorboard"

    @property
    def model(self) -> Path:
        """The trained model."""
        return self.root / "model"

    @property
    def holds_run(self) -> bool:
        """Whether a run was begun here."""
        return self.config.exists()

    def begin(self, config: str) -> None:
        """Make the folder for a new run; one that holds a run already is refused."""
        self.refuse_second_run()
        self.write(config)

    def refuse_second_run(self) -> None:
        """Refuse a folder that holds a run already."""
        if self.holds_run:
            raise ConfigError(
                f"{self.root} already holds a run; go on with it (--resume), "
                "or choose another folder (--out)"
            )

    def write(self, config: str) -> None:
        """Write the settings down, in place of older ones."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            write_whole(self.config, config.encode())
        except OSError as error:
            raise DataError(self.root, f"cannot be written ({error.strerror})") from error


def refuse_other_settings(saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse to go on with settings that would make it another run."""
    changed = [
        f"{name} was {before!r}, is {after!r}"
        for name, before, after in _differences(saved, given, "")
        if name.split(".")[0] not in _MAY_CHANGE
    ]
    if changed:
        raise ConfigError(
            f"a run is resumed with the settings it was begun with; {'; '.join(changed)}; "
            "set them back, or begin a new run (another --out)"
        )


def _differences(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Any, Any]]:
    for name in {**before, **after}:
        first, second = before.get(name), after.get(name)
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            yield from _differences(first, second, f"{prefix}{name}.")
        elif first != second:
            yield prefix + name, first, second
