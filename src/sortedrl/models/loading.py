"""Loads a model and its tokenizer: from the hub, a folder, a GGUF file or the spec `tiny`.

Nothing is padded, and a tokenizer needs neither a pad token nor a chat template. The progress bars
of transformers are disabled: a run has its own. A process that keeps only part of a model uses
`model_without_weights`, and reads the rows it needs from `stored_weights`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sortedrl.errors import DataError, ModelError
from sortedrl.models.shape import first_line, gguf_config, not_here, refuse_wrong_path
from sortedrl.models.tiny import is_tiny, tiny_model, tiny_settings, tiny_tokenizer

try:
    import torch
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file
    from torch import Tensor, nn
    from torch.nn.modules.module import register_module_parameter_registration_hook
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        PreTrainedModel,
    )
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file
    from transformers.utils.logging import (
        disable_progress_bar,
        enable_progress_bar,
        is_progress_bar_enabled,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"a model needs {error.name}; pip install 'sortedrl[native]'", name=error.name
    ) from error

_GIB = 1 << 30


@contextmanager
def without_bars() -> Iterator[None]:
    """Disable the progress bars of transformers inside the block."""
    had_bars = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            enable_progress_bar()


def load_model(
    name: str | Path, *, dtype: torch.dtype | None, device: torch.device | str | None
) -> PreTrainedModel:
    """Load a causal language model, by default to the GPU in bf16, or to the CPU in fp32.

    Its GPU becomes the current CUDA device.
    """
    where = _device(device)
    index: int | None = where.index
    if index is not None and where.type == "cuda":
        torch.cuda.set_device(where)
    kind = dtype or (torch.bfloat16 if where.type == "cuda" else torch.float32)
    model = _in_memory(name, kind)
    _refuse_too_big(model, where)
    torch.nn.Module.to(model, where)
    loaded: PreTrainedModel = model.eval()
    return loaded


def _device(name: torch.device | str | None) -> torch.device:
    has_gpu = torch.cuda.is_available()
    try:
        device = torch.device(name or ("cuda" if has_gpu else "cpu"))
    except RuntimeError as error:
        raise ModelError(f"{name!r} is not a device that torch knows; use cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device must be cpu or cuda, got {str(device)!r}")
    if device.type == "cuda" and not has_gpu:
        raise ModelError(f"device {name!r} needs a GPU, but torch finds none; use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"device {name!r} does not exist: torch finds {torch.cuda.device_count()} GPUs, "
            "counted from cuda:0"
        )
    return device


def load_tokenizer(name: str | Path) -> Any:  # noqa: ANN401
    """The tokenizer that belongs to a model."""
    if is_tiny(str(name)):
        tiny_settings(str(name))  # refuses an invalid spec
        return tiny_tokenizer()
    folder, gguf = folder_and_gguf(name)
    refuse_wrong_path(name)
    _refuse_without_gguf(gguf)
    try:
        with without_bars():
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
            if gguf is not None:
                is_here = Path(name).is_file()
                _take_end_token(
                    tokenizer,
                    gguf_config(Path(name))
                    if is_here
                    else AutoConfig.from_pretrained(folder, gguf_file=gguf),
                )
            tokenizer.encode("a")  # some damage only shows on first use
    except Exception as error:  # damaged files raise all kinds of errors
        raise ModelError(
            f"cannot load a tokenizer from {name}: {first_line(error)}{not_here(name)}"
        ) from error
    # Decoded text keeps the spaces before punctuation.
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def _take_end_token(tokenizer: Any, config: Any) -> None:  # noqa: ANN401
    """Set the end token of a tokenizer from a GGUF file as in the file.

    transformers uses the begin token of a byte-level BPE instead, so an imitated answer would end
    with the start of a message.
    """
    given: int | list[int] | None = config.eos_token_id
    ends = given if isinstance(given, list) else [given]
    if ends[0] is not None and tokenizer.eos_token_id not in ends:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])


def stop_tokens(model: PreTrainedModel) -> tuple[int, ...]:
    """The stop tokens of a model."""
    stop: int | list[int] | None = model.generation_config.eos_token_id
    return () if stop is None else (stop,) if isinstance(stop, int) else tuple(stop)


def stop_tokens_of(name: str | Path) -> tuple[int, ...]:
    """The stop tokens of a model, without loading its weights."""
    if is_tiny(str(name)):
        return stop_tokens(tiny_model(tiny_settings(str(name))))
    folder, gguf = folder_and_gguf(name)
    _refuse_without_gguf(gguf)
    try:
        stop = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        # Without such a file, the config has them.
        config = AutoConfig.from_pretrained(folder, gguf_file=gguf)
        stop = GenerationConfig.from_model_config(config).eos_token_id
    return () if stop is None else (stop,) if isinstance(stop, int) else tuple(stop)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, or of every `.safetensors` file in a folder."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise DataError(path, "has no .safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise DataError(file, f"is not a readable safetensors file: {error}") from error
    return tensors


def _in_memory(name: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    if is_tiny(str(name)):
        made = tiny_model(tiny_settings(str(name)))
        # Without its buffers: a model that is read from files has its rotary frequencies in fp32.
        for weight in made.parameters():
            weight.data = weight.data.to(dtype)
        return made
    folder, gguf = folder_and_gguf(name)
    refuse_wrong_path(name)
    _refuse_without_gguf(gguf)
    unpacked = None if gguf is None else _unpacking()
    try:
        with without_bars():
            if gguf is None:
                _refuse_quantized(name, AutoConfig.from_pretrained(folder))
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=gguf, dtype=dtype, quantization_config=unpacked
            )
    except ModelError:
        raise
    except Exception as error:  # damaged files raise all kinds of errors
        raise ModelError(
            f"cannot load {name} as a causal language model: {first_line(error)}{not_here(name)}"
        ) from error
    return model


def model_without_weights(name: str | Path, *, dtype: torch.dtype) -> PreTrainedModel:
    """Like `load_model` on the CPU, but with weights on the meta device."""
    with _weights_on_meta():
        model = _in_memory(name, dtype) if is_tiny(str(name)) else _as_configured(name, dtype)
    made: PreTrainedModel = model.eval()
    return made


def _as_configured(name: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    folder, gguf = folder_and_gguf(name)
    _refuse_without_gguf(gguf)
    try:
        with without_bars():
            config = AutoConfig.from_pretrained(folder, gguf_file=gguf)
            _refuse_quantized(name, config)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ModelError:
        raise
    except Exception as error:  # damaged files raise all kinds of errors
        raise ModelError(
            f"cannot load {name} as a causal language model: {first_line(error)}"
        ) from error
    # Without such a file, the config has them.
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


@contextmanager
def _weights_on_meta() -> Iterator[None]:
    """Create the parameters of new modules on the meta device; buffers have values."""

    def without_memory(_: nn.Module, __: str, weight: nn.Parameter) -> nn.Parameter | None:
        if weight.is_meta:
            return None
        return nn.Parameter(weight.to("meta"), requires_grad=weight.requires_grad)

    # The type says that a hook returns nothing, but its result is registered.
    hook = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


class StoredWeights(Mapping[str, Tensor]):
    """The weights of a model by name, read from its safetensors files on access."""

    def __init__(self, files: Mapping[str, Path], *, dtype: torch.dtype) -> None:
        """`files` maps weights to files; `dtype` is the precision to return."""
        self._files = files
        self._dtype = dtype

    def __getitem__(self, name: str) -> Tensor:
        """The whole weight."""
        return self.rows(name)

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._files)

    def __len__(self) -> int:
        """The number of weights."""
        return len(self._files)

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a weight as a copy; nothing else is read."""
        path = self._files[name]
        try:
            # Reopened each time: mapped pages stay in memory while the file is open.
            with safe_open(path, framework="pt") as file:
                part: Tensor = file.get_slice(name)[start:stop]
                return part.to(self._dtype, copy=True)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path}: {name} cannot be read: {first_line(error)}") from error


def stored_weights(
    name: str | Path, tensors: Mapping[str, Tensor], *, dtype: torch.dtype
) -> StoredWeights | None:
    """Lazy weights of a model, if its safetensors files have these names and shapes.

    `None` if transformers must load the model: `tiny`, GGUF and other formats, and files with other
    names, shapes or ties.
    """
    if is_tiny(str(name)) or folder_and_gguf(name)[1] is not None:
        return None
    together = names_by_tensor(tensors)
    wanted = {names[0]: [*tensors[names[0]].shape] for names in together}
    tied = {other for names in together for other in names[1:]}
    found: dict[str, Path] = {}
    try:
        for path in _safetensors_files(str(name)):
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (a file is no mapping)
                    if key in tied:
                        return None
                    if key in wanted and file.get_slice(key).get_shape() == wanted[key]:
                        found[key] = path
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot load {name}: {first_line(error)}") from error
    return StoredWeights(found, dtype=dtype) if found.keys() == wanted.keys() else None


def weights_of(name: str | Path, *, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """The weights of a model by name: lazy if possible, otherwise in main memory."""
    tensors = model_without_weights(name, dtype=dtype).state_dict(keep_vars=True)
    stored = stored_weights(name, tensors, dtype=dtype)
    return load_model(name, dtype=dtype, device="cpu").state_dict() if stored is None else stored


def names_by_tensor(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names grouped by tensor, in the order of first mention."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def _safetensors_files(name: str) -> list[Path]:
    """The safetensors files of a model; empty if it has other files."""
    with suppress(OSError):
        return [Path(_file(name, SAFE_WEIGHTS_NAME))]
    try:
        index = Path(_file(name, SAFE_WEIGHTS_INDEX_NAME))
    except OSError:
        return []
    try:
        files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: is not the index of a model: {first_line(error)}") from error
    return [Path(_file(name, file)) for file in files]


def _file(name: str, file: str) -> str:
    found: str | None = cached_file(name, file)
    if found is None:
        raise FileNotFoundError(f"{name} has no {file}")
    return found


def _unpacking() -> object:
    """Makes transformers dequantize a GGUF file: quantized weights cannot be trained or saved."""
    try:
        from transformers import GgufConfig
    except ImportError:  # older releases always dequantize
        return None
    return GgufConfig(dequantize=True)


def _refuse_quantized(name: str | Path, config: Any) -> None:  # noqa: ANN401
    found = config.to_dict().get("quantization_config")
    if found is not None:
        raise ModelError(
            f"{name} must have unquantized weights, got weights quantized with "
            f"{found.get('quant_method')!r}, which cannot be trained; use the original model, or "
            "a GGUF file, which is dequantized"
        )


def _refuse_without_gguf(gguf: str | None) -> None:
    missing = [name for name in ("gguf", "accelerate") if gguf and find_spec(name) is None]
    if missing:
        raise ModelError(
            f"a GGUF file needs the package {missing[0]}; install it with "
            "pip install 'sortedrl[gguf]'"
        )


def folder_and_gguf(name: str | Path) -> tuple[str, str | None]:
    """The folder or hub name for transformers, and the GGUF file in it."""
    path = Path(name)
    return (str(path.parent), path.name) if path.suffix == ".gguf" else (str(name), None)


def _refuse_too_big(model: PreTrainedModel, device: torch.device) -> None:
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    needed = sum(p.numel() * p.element_size() for p in model.parameters())
    if needed > free:
        raise ModelError(
            f"the model's {needed / _GIB:.1f} GiB of weights do not fit into the "
            f"{free / _GIB:.1f} GiB free on {device}; a model of "
            f"{100 * free / needed:.0f} % of this size would fit: use a smaller dtype or model"
        )
