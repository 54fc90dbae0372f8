"""Records from the `datasets` library: a name on the hub, or a folder it saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sortedrl.data.files import Record, plain
from sortedrl.errors import ConfigError, DataError


def read_hub(name: str, *, subset: str | None, split: str) -> Iterator[Record]:
    """The records of one split of a data set, in order."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{name}: reading data sets by name needs `datasets`; pip install 'sortedrl[data]'"
        ) from error
    try:
        if (Path(name) / "dataset_info.json").exists():
            loaded = datasets.load_from_disk(name)
        elif (Path(name) / "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(name)[split]
        else:
            loaded = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            name,
            f"cannot be loaded as a data set with split {split!r}: {error}; "
            "check the name and the connection, or give a local file",
        ) from error
    for number, values in enumerate(loaded, start=1):
        yield Record(f"{name}/{split}:{number}", {key: plain(v) for key, v in values.items()})
