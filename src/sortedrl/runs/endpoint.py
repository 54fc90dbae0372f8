"""The JSON of `sortedrl serve`: requests become turns, answers become JSON.

Two forms of a request: vLLM's /inference/v1/generate and OpenAI's /v1/completions. An unknown field
that would change the answer is refused by name, and so is a value that is not supported.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from sortedrl.data.stream import Tokenizer
from sortedrl.engines.sampling import RequestLimits, Sampling
from sortedrl.errors import ConfigError, DataError, ModelError, unknown_name
from sortedrl.runs.turns import HttpError, Turn, TurnScheduler
from sortedrl.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Answer = dict[str, object]
_MOST_NAME = 256
_MOST_PATH = 4096
_MOST_STOPS = 16


class WeightReader:
    """Reads new weights, as safetensors, from folders below the folder of the settings."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        """They must have the names and shapes of `model`."""
        self._folder = folder
        self._model = model

    def read(self, path: str) -> Mapping[str, object]:
        """All tensors of a folder; raises `HttpError` unless they fit the model."""
        from sortedrl.engines.native.hf_model import checked_weights
        from sortedrl.models.loading import read_safetensors

        try:
            root = self._folder.resolve(strict=True)
            found = (root / path).resolve(strict=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise HttpError(
                400, f"model_path must be a folder, but {path!r} does not exist"
            ) from error
        if not found.is_relative_to(root):
            raise HttpError(
                403, f"model_path must lie below the server's --weights-folder, got {path!r}"
            )
        try:
            tensors = checked_weights(self._model, read_safetensors(found))
        except (DataError, ModelError) as error:
            raise HttpError(400, str(error)) from error
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise HttpError(
                    400, f"weights must be finite, but {name} is not; the server keeps the old ones"
                )
        return tensors


class _Fields:
    """The fields of a JSON object; each is read by its name, and any other is refused."""

    def __init__(self, row: object, *, within: str = "") -> None:
        """`within` names the object in messages, with a dot, such as `sampling_params.`."""
        if not isinstance(row, dict):
            raise HttpError(400, f"{within.rstrip('.') or 'the body'} must be a JSON object")
        self._row = row
        self._within = within
        self._known: list[str] = []

    def take(self, name: str) -> object:
        """The value, `None` where it is missing."""
        self._known.append(name)
        value: object = self._row.get(name)
        return value

    def refused(self, name: str, must: str, value: object) -> HttpError:
        return HttpError(400, f"{self._within}{name} must be {must}, got {value!r:.80}")

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        value = self.take(name)
        if value is None:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and isinstance(value, int | float) and -1e18 < value < 1e18):
            raise self.refused(name, "a finite number", value)
        return float(value)

    def whole(self, name: str, *, low: int, high: int) -> int | None:
        """A whole number within bounds."""
        value = self.take(name)
        if value is None:
            return None
        if type(value) is not int or not low <= value <= high:
            raise self.refused(name, f"a whole number in {low}..{high}", value)
        return value

    def flag(self, name: str) -> bool:
        """True or false; false where it is missing."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self.refused(name, "true or false", value)
        return bool(value)

    def text(self, name: str, *, most: int = _MOST_NAME) -> str | None:
        """A short text."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, str) or not is_name(value, most=most):
            raise self.refused(name, f"printable text of 1..{most} characters", value)
        return value

    def texts(self, name: str, *, most: int) -> tuple[str, ...]:
        """One text or a list of them."""
        value = self.take(name)
        listed = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or len(listed) > most:
            raise self.refused(name, f"a text or a list of at most {most}", value)
        for text in listed:
            if not isinstance(text, str) or not 1 <= len(text) <= _MOST_NAME:
                raise self.refused(name, f"texts of 1..{_MOST_NAME} characters", text)
        return tuple(listed)

    def tokens(self, name: str, *, vocabulary: int) -> list[int]:
        return self.checked_tokens(name, self.take(name) or [], vocabulary=vocabulary)

    def checked_tokens(self, name: str, value: object, *, vocabulary: int) -> list[int]:
        """The value, if it is a list of token ids."""
        if not isinstance(value, list):
            raise self.refused(name, "a list of token ids", value)
        for token in value:
            if type(token) is not int or not 0 <= token < vocabulary:
                raise HttpError(
                    400,
                    f"{self._within}{name}: token ids must be whole numbers in "
                    f"0..{vocabulary - 1}, got {token!r:.80}; was it made with the tokenizer of "
                    "this model?",
                )
        return value

    def refuse_unknown(self, only: Mapping[str, Sequence[object]], ignored: Sequence[str]) -> None:
        """Refuse fields that were not read, unless they change nothing.

        `only` has fields that may have these values alone, `ignored` those that may have any.
        """
        for name, value in self._row.items():
            if name in self._known or name in ignored or value is None:
                continue
            if name not in only:
                what = "sampling parameter" if self._within else "field"
                known = (*self._known, *only, *ignored)
                raise HttpError(400, unknown_name(what, name, known))
            if value not in only[name]:
                allowed = " or ".join(json.dumps(one) for one in only[name])
                raise HttpError(
                    400,
                    f"{self._within}{name} must be {allowed or 'left out'}, got {value!r:.80}; "
                    "nothing else is supported",
                )


def is_name(text: str, *, most: int = _MOST_NAME) -> bool:
    """Whether a text can name a session, a request or a version."""
    return 1 <= len(text) <= most and text.isprintable()


_SAMPLING_ONLY: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "n": (1,),
        "best_of": (1,),
        "use_beam_search": (False,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "length_penalty": (1,),
        "min_tokens": (0,),
        "prompt_logprobs": (0,),
        "logit_bias": ({},),
        "bad_words": ([],),
        "allowed_token_ids": (),
        "truncate_prompt_tokens": (),
        "structured_outputs": (),
        "extra_args": ({},),
    }
)
"""Parameters of vLLM that change what is sampled, and the values with which they do not."""
_SAMPLING_IGNORED = (
    *("skip_special_tokens", "spaces_between_special_tokens", "detokenize", "output_kind"),
    *("include_stop_str_in_output", "routed_experts_prompt_start", "flat_logprobs"),
)
"""Parameters of vLLM about text or other things than the tokens of the answer."""
_REQUEST_ONLY: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "stream": (False,),
        "stream_options": (),
        "priority": (0,),
        "features": ({},),
        "content_parts": ([],),
        "output_mode": ("tokens",),
        "kv_transfer_params": (),
        "ec_transfer_params": (),
    }
)
_REQUEST_IGNORED = ("cache_salt", "token_offsets", "reasoning_ended", "reasoning_parser_kwargs")
"""The cache is shared, and never outlives its weights: a salt changes no answer."""
_COMPLETION_ONLY: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        **{name: _REQUEST_ONLY[name] for name in ("stream", "stream_options", "priority")},
        "echo": (False,),
        "suffix": ("",),
        "add_special_tokens": (True,),
        "response_format": ({"type": "text"},),
    }
)
_COMPLETION_IGNORED = ("user", "cache_salt", "return_tokens_as_token_ids")
_WEIGHTS_ONLY: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "load_format": ("auto", "safetensors"),
        "abort_all_requests": (False,),
        "is_async": (False,),
        "keep_pause": (False,),
    }
)
_WEIGHTS_IGNORED = ("flush_cache", "torch_empty_cache", "recapture_cuda_graph", "token_step")
"""The cache is always flushed: it belongs to the weights."""


@dataclass(frozen=True, slots=True)
class Request:
    """A turn, and the form of its answer."""

    turn: Turn
    answer: Callable[[Trajectory], Answer]


class Endpoint:
    """Converts JSON requests to turns, and answers to JSON."""

    def __init__(
        self,
        scheduler: TurnScheduler,
        *,
        name: str,
        limits: RequestLimits,
        max_tokens: int,
        stop_tokens: Sequence[int],
        tokenizer: Tokenizer,
        weights: WeightReader | None = None,
    ) -> None:
        """Requests for the model `name`, of at most `max_tokens` generated tokens each."""
        self.scheduler = scheduler
        self._name = name
        self._limits = limits
        self._max_tokens = max_tokens
        self._stop_tokens = frozenset(stop_tokens)
        self._tokenizer = tokenizer
        self._encoding = threading.Lock()
        self._weights = weights
        self._reading = threading.Lock()
        self._created = int(time.time())

    @property
    def most_bytes(self) -> int:
        """The largest body that is accepted."""
        return (1 << 20) + 16 * self._limits.max_length

    def generate(self, body: object, *, session_id: str | None) -> Request:
        """A request as vLLM's /inference/v1/generate has it."""
        fields = _Fields(body)
        self._check_model(fields)
        request_id = fields.text("request_id") or f"generate-{secrets.token_hex(12)}"
        tokens = fields.tokens("token_ids", vocabulary=self._limits.vocabulary)
        shows_prompt = fields.flag("return_token_ids")
        row = fields.take("sampling_params")
        fields.refuse_unknown(_REQUEST_ONLY, _REQUEST_IGNORED)
        inner = _Fields({} if row is None else row, within="sampling_params.")
        turn = self._turn(inner, "token_ids", tokens, session_id=session_id)
        inner.whole("logprobs", low=0, high=1)
        inner.refuse_unknown(_SAMPLING_ONLY, _SAMPLING_IGNORED)

        def answer(trajectory: Trajectory) -> Answer:
            content = [
                {"token": f"token_id:{token}", "token_id": token, "logprob": logprob}
                for token, logprob in zip(trajectory.tokens, trajectory.logprobs, strict=True)
            ]
            choice = {
                "index": 0,
                "token_ids": trajectory.tokens,
                "logprobs": {"content": content},
                "finish_reason": trajectory.finish_reason,
                "weight_versions": self._spans(trajectory),
            }
            return {
                "request_id": request_id,
                "model": self._name,
                "created": int(time.time()),
                "choices": [choice],
                "usage": _usage(turn, trajectory),
                **({"prompt_token_ids": tokens} if shows_prompt else {}),
            }

        return Request(turn, answer)

    def complete(self, body: object, *, session_id: str | None) -> Request:
        """A request as OpenAI's /v1/completions has it, with vLLM's additions."""
        fields = _Fields(body)
        self._check_model(fields)
        request_id = fields.text("request_id") or f"cmpl-{secrets.token_hex(12)}"
        tokens = self._prompt(fields)
        shows_prompt = fields.flag("return_token_ids")
        shows_special = fields.take("skip_special_tokens") is False
        keeps_stop = fields.flag("include_stop_str_in_output")
        shows_logprobs = fields.whole("logprobs", low=0, high=1) is not None
        turn = self._turn(fields, "prompt", tokens, session_id=session_id)
        fields.refuse_unknown(
            {**_COMPLETION_ONLY, **_SAMPLING_ONLY}, (*_COMPLETION_IGNORED, *_SAMPLING_IGNORED)
        )

        def answer(trajectory: Trajectory) -> Answer:
            written = trajectory.tokens
            text = self._tokenizer.decode(written, skip_special_tokens=not shows_special)
            stops = turn.sampling.stop_strings
            ends = [at for at in map(text.find, stops) if at >= 0]
            logprobs = {
                "tokens": [f"token_id:{token}" for token in written],
                "token_logprobs": trajectory.logprobs,
                "top_logprobs": None,
                "text_offset": None,
            }
            choice = {
                "index": 0,
                "text": text[: min(ends)] if ends and not keeps_stop else text,
                "token_ids": written,
                "logprobs": logprobs if shows_logprobs else None,
                "finish_reason": trajectory.finish_reason,
                "weight_versions": self._spans(trajectory),
                **({"prompt_token_ids": tokens} if shows_prompt else {}),
            }
            return {
                "id": request_id,
                "object": "text_completion",
                "created": int(time.time()),
                "model": self._name,
                "choices": [choice],
                "usage": _usage(turn, trajectory),
            }

        return Request(turn, answer)

    def update_weights(self, body: object) -> Answer:
        """Load the weights of a folder; answers when the engine has them."""
        fields = _Fields(body)
        path = fields.text("model_path", most=_MOST_PATH)
        version = fields.take("weight_version")
        label = str(version) if type(version) is int else version
        if label is not None and not (isinstance(label, str) and is_name(label)):
            raise fields.refused("weight_version", "a short text or a whole number", version)
        fields.refuse_unknown(_WEIGHTS_ONLY, _WEIGHTS_IGNORED)
        if self._weights is None:
            raise HttpError(
                403, "this server loads no weights: it was started without --weights-folder"
            )
        if path is None:
            raise HttpError(400, "model_path must name a folder with .safetensors files")
        if not self._reading.acquire(blocking=False):
            raise HttpError(409, "other weights are being loaded; try again later")
        try:
            loaded = self.scheduler.load(self._weights.read(path), label=label)
        finally:
            self._reading.release()
        return {
            "success": True,
            "message": f"loaded {path}",
            "weight_version": loaded.version,
            "num_paused_requests": loaded.num_interrupted,
        }

    def models(self) -> Answer:
        """The one model, as OpenAI's /v1/models and vLLM list it."""
        card = {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "sortedrl",
            "max_model_len": self._limits.max_length,
        }
        return {"object": "list", "data": [card]}

    def info(self) -> Answer:
        """The load of the server."""
        counts = self.scheduler.counts
        return {
            "model": self._name,
            "max_model_len": self._limits.max_length,
            "max_tokens": self._max_tokens,
            **asdict(counts),
        }

    def _check_model(self, fields: _Fields) -> None:
        given = fields.take("model")
        if given is not None and given != self._name:
            raise HttpError(404, f"model must be {self._name!r}, the one served, got {given!r:.80}")

    def _prompt(self, fields: _Fields) -> list[int]:
        value = fields.take("prompt")
        if isinstance(value, list) and value and isinstance(value[0], list | str):
            if len(value) > 1:
                raise HttpError(
                    400, f"prompt must be one prompt, got {len(value)}; send each alone"
                )
            value = value[0]
        if isinstance(value, str):
            with self._encoding:
                tokens = self._tokenizer.encode(value, add_special_tokens=True)
            # Some tokenizers append an end token; an answer follows.
            is_ended = bool(tokens) and tokens[-1] == self._tokenizer.eos_token_id
            return tokens[:-1] if is_ended else tokens
        return fields.checked_tokens(
            "prompt", [] if value is None else value, vocabulary=self._limits.vocabulary
        )

    def _turn(
        self, fields: _Fields, name: str, tokens: Sequence[int], *, session_id: str | None
    ) -> Turn:
        longest = self._limits.max_length
        if not 1 <= len(tokens) < longest:
            raise HttpError(
                400,
                f"{name} must have 1..{longest - 1} tokens, got {len(tokens)}: the model's context "
                f"and the KV cache hold {longest}, and the answer needs at least one",
            )
        most = fields.whole("max_tokens", low=1, high=self._max_tokens) or self._max_tokens
        stops = fields.texts("stop", most=_MOST_STOPS)
        # A renderer may know more tokens than the model has.
        extra = fields.tokens("stop_token_ids", vocabulary=2**31)
        ends = frozenset() if fields.flag("ignore_eos") else self._stop_tokens
        top_k = fields.whole("top_k", low=-1, high=2**31 - 1)
        seed = fields.whole("seed", low=-(2**63), high=2**64 - 1)
        try:
            sampling = Sampling(
                temperature=fields.number("temperature", 1.0),
                top_k=top_k if top_k is not None and top_k > 0 else None,
                top_p=fields.number("top_p", 1.0),
                min_p=fields.number("min_p", 0.0),
                stop_tokens=ends | frozenset(extra),
                stop_strings=stops,
                max_tokens=min(most, longest - len(tokens)),
            )
        except ConfigError as error:
            raise HttpError(400, str(error)) from error
        return Turn(tokens, sampling, seed=seed, session_id=session_id)

    def _spans(self, trajectory: Trajectory) -> list[Answer]:
        """The version of the weights of each span of tokens, in the form of vLLM and SGLang."""
        spans: list[Answer] = []
        start = 0
        for segment in trajectory.segments:
            end = start + len(segment.tokens)
            label = self.scheduler.label(segment.version)
            spans.append({"version": label, "start": start, "end": end})
            start = end
        return spans


def _usage(turn: Turn, trajectory: Trajectory) -> Answer:
    prompt, written = len(turn.tokens), trajectory.num_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
    }
