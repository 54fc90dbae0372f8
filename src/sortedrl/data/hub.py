"""Records from the `datasets` library: a name on the hub, or a folder it saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sortedrl.data.files import Record, record_of
from sortedrl.errors import ConfigError, DataError


def read_hub(name: str, *, subset: str | None, split: str) -> Iterator[Record]:
    """The records of one split of a data set, in order."""
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise ConfigError(
            f"{name}: reading data sets by name needs `datasets`; pip install 'sortedrl[data]'"
        ) from error
    try:
        if (Path(name) / "dataset_info.json").exists():
            loaded = datasets.load_from_disk(name)
            if loaded.split not in (None, split):
                raise ValueError(f"it is the split {str(loaded.split)!r}")
        elif (Path(name) / "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(name)[split]
        else:
            loaded = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, LookupError, RuntimeError, DatasetsError) as error:
        raise DataError(
            name,
            f"cannot be loaded as a data set with split {split!r}: {error}; "
            "check the name and the connection, name another split (split=...), or give a local "
            "file; files of the maths sets are looked for in --folder, or in $SORTEDRL_DATA",
        ) from error
    # Plain Python values, whatever the data set was saved to give.
    for number, values in enumerate(loaded.with_format(None), start=1):
        yield record_of(values, f"{name}/{split}:{number}")
