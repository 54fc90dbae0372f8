"""The checkpoints of a run: the last few and the best, each a folder that is complete or ignored.

    update-000100/             the best
    update-000200/             the last
      model/                   a Hugging Face folder: weights, config, tokenizer
      optimiser.safetensors    tensors by name; a critic has such files too
      buffer.bin               answers begun and not yet trained on
      state.json               counters, and everything small
      manifest.json            what this is; the size and the checksum of every other file
    update-000250.partial/     being written, or left by a process that was killed

A checkpoint is written under its name with `.partial`, flushed to disk, the manifest last, and then
renamed. So what has its final name is complete, and older ones are never modified. Only
safetensors, JSON and our own buffer files are read; a folder with a pickle is refused.

A checkpoint may be written by a thread while training continues (`save_later`), one at a time. It
must write copies of what is trained. Its failure is raised by the next call.

There is no state outside these folders: a checkpoint has its own score, so a process killed between
saving and deleting leaves only an extra folder, which the next save deletes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sortedrl.core.files import free_path, write_whole
from sortedrl.errors import CheckpointError
from sortedrl.models.attention_interface import not_finite

PARTIAL = ".partial"
_REPLACED = ".replaced"
_MANIFEST = "manifest.json"
_FORMAT = "sortedrl-checkpoint"
_VERSION = 1
_USE_ANOTHER = "use another checkpoint"
_PICKLES = frozenset({".pt", ".pth", ".pkl", ".pickle", ".ckpt"})
_ADVICE = {
    errno.ENOSPC: "free space there, or lower saving.keep_last, and resume",
    errno.EDQUOT: "free space within your quota, or lower saving.keep_last, and resume",
    errno.EACCES: "make the folder writable or choose another one, and resume",
    errno.EPERM: "make the folder writable or choose another one, and resume",
    errno.EROFS: "choose a folder on a disk that can be written to, and resume",
}


def save(folder: Path, write: Callable[[Path], None], *, previous: Path | None = None) -> None:
    """Let `write` fill a folder, and give it its name once all of it is on the disk.

    `previous` is the last complete checkpoint, which the error names if this one fails.
    """

    def why_not(reason: str, number: int | None) -> str:
        last = (
            f"the last complete checkpoint is {previous.name}"
            if previous is not None
            else "there is no complete checkpoint yet"
        )
        advice = _ADVICE.get(number or 0, "fix this, and resume")
        return f"{folder}: the checkpoint cannot be saved: {reason}; {last}; {advice}"

    with _partial(folder, why_not) as partial:
        recover(folder)
        write(partial)
        _seal(partial)
        _put_in_place(partial, folder)


def write_model(folder: Path, write: Callable[[Path], None], *, otherwise: str) -> None:
    """Let `write` fill the folder of a trained model: all of its files appear, or none.

    Existing files stay. `otherwise` is the advice where the disk cannot take it.
    """

    def why_not(reason: str, _: int | None) -> str:
        return f"{folder}: the trained model cannot be written: {reason}; {otherwise}"

    with _partial(folder, why_not) as partial:
        write(partial)
        for path in _files(partial):
            place = folder / path.relative_to(partial)
            place.parent.mkdir(parents=True, exist_ok=True)
            _to_disk(path)
            path.replace(place)


@contextmanager
def _partial(folder: Path, why_not: Callable[[str, int | None], str]) -> Iterator[Path]:
    """An empty folder beside the one to be written; it is removed in the end.

    An error of the disk becomes a `CheckpointError` with the message for its reason and number.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
    except Exception as error:
        # safetensors and tokenizers raise kinds of their own when a disk is full.
        number = _number_in(error)
        if not isinstance(error, OSError) and number is None:
            raise
        reason = os.strerror(number) if number is not None else str(error)
        raise CheckpointError(why_not(reason, number)) from error
    finally:
        # A full disk gets its space back.
        shutil.rmtree(partial, ignore_errors=True)


def recover(folder: Path) -> None:
    """Finish or undo a replacement that was interrupted by a kill."""
    replaced = folder.with_name(folder.name + _REPLACED)
    if not replaced.exists():
        return
    try:
        if folder.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(folder)
    except OSError as error:
        raise CheckpointError(
            f"{replaced}: cannot be moved or deleted ({error.strerror}); make "
            f"{folder.parent} writable"
        ) from error


def inspect(folder: Path) -> dict[str, str]:
    """The checksum of every file, if all are there in their sizes: `verify` without reading them.

    Raises `CheckpointError` naming the file that is missing, truncated or foreign.
    """
    checksums = {}
    for name, (size, checksum) in _read_manifest(folder).items():
        path = folder / name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path}: missing ({error.strerror}); {_USE_ANOTHER}") from error
        if found != size:
            raise CheckpointError(
                f"{path}: must hold {size} bytes, got {found}: truncated; {_USE_ANOTHER}"
            )
        checksums[name] = checksum
    _refuse_pickles(folder)
    return checksums


def verify(folder: Path) -> None:
    """Read every file; `CheckpointError` naming the one that is missing, truncated or damaged."""
    for name, checksum in inspect(folder).items():
        path = folder / name
        try:
            found = _checksum(path)
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error.strerror}); {_USE_ANOTHER}"
            ) from error
        if found != checksum:
            raise CheckpointError(f"{path}: checksum differs: damaged; {_USE_ANOTHER}")


def refuse_not_finite(
    tensors: Mapping[str, Tensor], *, together: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Raise where weights about to be written are not finite.

    `together` sums the findings of ranks that have a part of each tensor, so that all raise.
    """
    broken = not_finite(tensors)
    if together is not None:
        flags = together(torch.tensor([float(name in broken) for name in tensors]))
        broken = [name for name, flag in zip(tensors, flags.tolist(), strict=True) if flag]
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise CheckpointError(
            f"weights must be finite to be saved, but {broken[0]}{more} hold NaN or infinite "
            "values: the training has diverged. They were not written, and the last checkpoint "
            "is intact; lower optimiser.learning_rate and resume from it (--resume)"
        )


def write_tensors(folder: Path, name: str, *, tensors: Mapping[str, Tensor]) -> None:
    """Write `<name>.safetensors`, for use inside `save`."""
    whole = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
    save_file(whole, folder / f"{name}.safetensors")


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """The tensors of `<name>.safetensors`, on the CPU."""
    path = _listed(folder, f"{name}.safetensors")
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); {_USE_ANOTHER}") from error


_HEADER_ALIGNMENT = 8
_STORED_AS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorFile:
    """A safetensors file that is written tensor by tensor, so that one at a time is in memory.

        bytes of the header | header: dtype, shape and place by name | tensors

    Their dtypes and shapes are known before; they may come in any order.
    """

    def __init__(self, path: Path, like: Mapping[str, Tensor]) -> None:
        """Open a file for tensors of these dtypes and shapes."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        # The largest numbers first, so that each begins at a multiple of its size.
        for name in sorted(like, key=lambda name: (-like[name].dtype.itemsize, name)):
            start, end = end, end + like[name].dtype.itemsize * like[name].shape.numel()
            header[name] = {
                "dtype": _STORED_AS[like[name].dtype],
                "shape": [*like[name].shape],
                "data_offsets": [start, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        self._path = path
        self._header = header
        self._first = 8 + len(text)
        self._missing = {*like}
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor."""
        kind = self._header[name]
        assert (_STORED_AS[tensor.dtype], [*tensor.shape]) == (kind["dtype"], kind["shape"])
        self._file.seek(self._first + kind["data_offsets"][0])
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        self._file.write(flat.view(torch.uint8).numpy().data)
        self._missing.remove(name)

    def close(self) -> None:
        """The file is complete."""
        self._file.close()
        assert not self._missing, f"{self._path.name} must have all of its tensors"


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write `state.json`, for use inside `save`."""
    (folder / "state.json").write_text(json.dumps(state, indent=1) + "\n")


def read_state(folder: Path) -> dict[str, Any]:
    """The counters."""
    return _read_object(_listed(folder, "state.json"))


def _seal(folder: Path) -> None:
    """Flush every file to disk, and write the manifest."""
    _refuse_pickles(folder)
    files = {}
    for path in _files(folder):
        _to_disk(path)
        files[path.relative_to(folder).as_posix()] = {
            "size": path.stat().st_size,
            "sha256": _checksum(path),
        }
    manifest = {"format": _FORMAT, "version": _VERSION, "files": files}
    write_whole(folder / _MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    for inner in sorted(path for path in folder.rglob("*") if path.is_dir()):
        _to_disk(inner)
    _to_disk(folder)


def _put_in_place(partial: Path, folder: Path) -> None:
    """Rename; a folder of that name (from an abandoned continuation of the run) is replaced."""
    replaced = folder.with_name(folder.name + _REPLACED)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    _to_disk(folder.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> Iterator[Path]:
    return iter(sorted(path for path in folder.rglob("*") if path.is_file()))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refuse_pickles(folder: Path) -> None:
    for path in _files(folder):
        # Our files with this suffix are at the top; PyTorch's pickles would be in model/.
        is_foreign_bin = path.suffix == ".bin" and path.parent != folder
        if path.suffix in _PICKLES or is_foreign_bin:
            raise CheckpointError(
                f"{path}: a checkpoint must hold no pickle, which could run foreign code; "
                "remove the file if you know where it comes from"
            )


def _read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    path = folder / _MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: not a complete sortedrl checkpoint (it has no {_MANIFEST}); check the path"
        )
    manifest = _read_object(path)
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path}: format must be {_FORMAT!r}, got {manifest.get('format')!r}: written by "
            "another program; check the path"
        )
    if manifest.get("version") != _VERSION:
        raise CheckpointError(
            f"{path}: version must be {_VERSION}, got {manifest.get('version')!r}; "
            "update sortedrl or use another checkpoint"
        )
    try:
        files = {n: (int(f["size"]), str(f["sha256"])) for n, f in manifest["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged ({error!r}); {_USE_ANOTHER}") from error
    for name in files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{path}: names {name!r}, outside the folder; {_USE_ANOTHER}")
    return files


def _listed(folder: Path, name: str) -> Path:
    if name not in _read_manifest(folder):
        raise CheckpointError(
            f"{folder}: has no {name}; it was saved by a run with other settings, resume with those"
        )
    return folder / name


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); {_USE_ANOTHER}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object; {_USE_ANOTHER}")
    return value


def _number_in(error: Exception) -> int | None:
    """The errno of an error; libraries written in Rust have it in their message."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


_NAME = re.compile(r"update-(\d{6,})")
_SCORE = "score.json"
_ABANDONED = ".abandoned"


class Checkpoints:
    """The folder that holds them."""

    def __init__(
        self, folder: Path, *, keep_last: int, keep_best: bool, warn: Callable[[str], None]
    ) -> None:
        """Nothing is read or written yet; `warn` gets what is skipped or set aside."""
        self._folder = folder
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._warn = warn
        self._writing: Future[Path] | None = None
        self._warnings: list[str] = []
        """Of the save in the background."""

    def path_for(self, update: int) -> Path:
        """The folder of the checkpoint of an update."""
        return self._folder / f"update-{update:06d}"

    def save(
        self, update: int, write: Callable[[Path], None], *, score: float | None = None
    ) -> Path:
        """Save what `write` puts into a folder, and delete checkpoints that are no longer kept.

        Without a score a checkpoint is never the best one.
        """
        self.finish()
        return self._save(update, write, score=score, warn=self._warn)

    def save_later(
        self, update: int, write: Callable[[Path], None], *, score: float | None = None
    ) -> None:
        """The same in a thread, once the save before is done; see `check` and `finish`."""
        self.finish()
        warn = self._warnings.append
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing = thread.submit(lambda: self._save(update, write, score=score, warn=warn))
        thread.shutdown(wait=False)

    def check(self) -> None:
        """Raise the error of a save in the background that has failed, without waiting for one."""
        if self._writing is not None and self._writing.done():
            self.finish()

    def finish(self) -> None:
        """Wait for a save in the background; raises what it failed with."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        error = writing.exception()
        while self._warnings:
            self._warn(self._warnings.pop(0))
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for a save in the background; a failure is only warned about."""
        try:
            self.finish()
        except CheckpointError as error:
            self._warn(str(error))

    def _save(
        self,
        update: int,
        write: Callable[[Path], None],
        *,
        score: float | None,
        warn: Callable[[str], None],
    ) -> Path:
        def write_with_score(folder: Path) -> None:
            write(folder)
            (folder / _SCORE).write_text(json.dumps({"score": score}) + "\n")

        self._recover()
        self._remove_leftovers()
        path = self.path_for(update)
        # A resume that has nothing left to train on saves the same one again.
        before = (folder for folder in self.complete() if folder.name <= path.name)
        save(path, write_with_score, previous=next(before, None))
        self._set_future_aside(update, warn)
        self._prune(warn)
        return path

    def complete(self) -> list[Path]:
        """Those whose files all have their sizes, the newest first; contents are not read."""
        return [folder for folder in self._named() if _problem(folder, inspect) is None]

    @property
    def num_named(self) -> int:
        """How many there are, complete or not."""
        return len(self._named())

    def newest(self) -> Path | None:
        """The newest that is intact to the byte; warns about those that are skipped."""
        self._recover()
        for folder in self._named():
            problem = _problem(folder, verify)
            if problem is None:
                return folder
            self._warn(f"checkpoint {folder.name} is skipped: {problem}")
        return None

    def best(self) -> Path | None:
        """The one with the highest score; of several, the oldest."""
        scores = {folder: _score(folder) for folder in reversed(self.complete())}
        scored = {folder: score for folder, score in scores.items() if score is not None}
        return max(scored, key=scored.__getitem__, default=None)

    def _named(self) -> list[Path]:
        """Everything with the name of a checkpoint, the newest first."""
        if not self._folder.is_dir():
            return []
        named = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(named, key=_update, reverse=True)

    def _recover(self) -> None:
        for path in self._folder.glob("update-*"):
            found = _NAME.match(path.name)
            if found:
                recover(self._folder / found[0])

    def _prune(self, warn: Callable[[str], None]) -> None:
        complete = self.complete()
        best = self.best() if self._keep_best else None
        for folder in complete[self._keep_last :]:
            if folder == best:
                continue
            # Renamed first: half a checkpoint never has the name of a whole one.
            doomed = folder.with_name(folder.name + PARTIAL)
            try:
                folder.rename(doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                warn(f"{folder}: the old checkpoint cannot be deleted ({error.strerror})")

    def _remove_leftovers(self) -> None:
        for path in self._folder.glob(f"update-*{PARTIAL}"):
            shutil.rmtree(path, ignore_errors=True)

    def _set_future_aside(self, update: int, warn: Callable[[str], None]) -> None:
        """Rename checkpoints of later updates, from an abandoned continuation of the run."""
        for folder in self._named():
            if _update(folder) > update:
                name = f"{folder.name}{_ABANDONED}"
                numbered = (f"{name}-{number}" for number in count(2))
                aside = free_path(folder.parent, chain([name], numbered))
                folder.rename(aside)
                warn(
                    f"checkpoint {folder.name} is later than update {update}, from which this run "
                    f"was resumed; it was renamed to {aside.name}, delete it if you do not need it"
                )


def _update(folder: Path) -> int:
    return int(folder.name.removeprefix("update-"))


def _problem(folder: Path, check: Callable[[Path], object]) -> str | None:
    try:
        check(folder)
    except CheckpointError as error:
        return str(error)
    return None


def _score(folder: Path) -> float | None:
    try:
        score = json.loads((folder / _SCORE).read_bytes())["score"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return score if isinstance(score, int | float) and not math.isnan(score) else None
