"""Rewards by another model: a judge behind an OpenAI-compatible URL.

    reward = "judge"
    reward_options = ["url=http://localhost:8000/v1", "model=NAME"]

The judge gets the question, the gold answer (if the row has one) and the response, and must end
with `Score: x`, x between 0 and `scale`. Requests run concurrently (`rewards.concurrency`) and are
retried; equal requests are sent once. Its tokens and failures are parts of the
reward, and so in the metrics of every update: `judge_tokens`, `judge_failed`, `judge_cached`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from sortedrl.errors import ConfigError
from sortedrl.types import Prompt

TEMPLATE = """Rate how well the response answers the question.

Question:
{question}

{gold}Response:
{response}

Think briefly, then end with one line: Score: x, where x is a number from 0 (useless) to {scale:g}
(perfect)."""
_SCORE = re.compile(r"score\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)", re.IGNORECASE)
_RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
_CACHE_ENTRIES = 100_000
_Verdict = tuple[float | None, int]
_answers: dict[str, asyncio.Future[_Verdict]] = {}


async def judge_reward(
    prompt: Prompt,
    response: str,
    *,
    url: str,
    model: str,
    template: str = TEMPLATE,
    scale: float = 10.0,
    attempts: int = 3,
    seconds: float = 60.0,
    wait_seconds: float = 1.0,
    max_tokens: int = 512,
    key_variable: str = "OPENAI_API_KEY",
    failure_reward: float = 0.0,
) -> Mapping[str, float]:
    """The judge's score over `scale`; `failure_reward` if it gives none after all attempts.

    `rewards.time_limit_seconds` must allow for `attempts` times `seconds`.
    """
    gold = prompt.fields.get("answer")
    content = template.format(
        question=_question(prompt),
        gold="" if gold is None else f"Right answer:\n{gold}\n\n",
        response=response,
        scale=scale,
    )
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    name = hashlib.sha256(json.dumps([url, body]).encode()).hexdigest()
    known = _answers.get(name)
    if known is None:
        known = asyncio.ensure_future(
            _verdict(url, body, attempts, seconds, wait_seconds, os.environ.get(key_variable))
        )
        if len(_answers) >= _CACHE_ENTRIES:
            _answers.clear()
        _answers[name] = known
        is_cached = False
    else:
        is_cached = True
    score, tokens = await asyncio.shield(known)
    if score is None:
        _answers.pop(name, None)  # a later request may succeed
    return {
        "reward": failure_reward if score is None else min(max(score / scale, 0.0), 1.0),
        "judge_failed": float(score is None),
        "judge_tokens": 0.0 if is_cached else float(tokens),
        "judge_cached": float(is_cached),
    }


def lowest_judge_reward(options: Mapping[str, Any]) -> float:
    """The reward of a useless response or a failed judge."""
    return min(0.0, float(options["failure_reward"]))


async def _verdict(
    url: str,
    body: Mapping[str, Any],
    attempts: int,
    seconds: float,
    wait_seconds: float,
    key: str | None,
) -> _Verdict:
    tokens = 0
    for attempt in range(attempts):
        if attempt:
            await asyncio.sleep(wait_seconds * 2 ** (attempt - 1))
        completion = await asyncio.to_thread(_post, url, body, seconds, key)
        if completion is None:
            continue
        tokens += int((completion.get("usage") or {}).get("total_tokens") or 0)
        found = _SCORE.findall(str(completion["choices"][0]["message"]["content"] or ""))
        if found:
            return float(found[-1]), tokens
    return None, tokens


def _post(url: str, body: Mapping[str, Any], seconds: float, key: str | None) -> Any:  # noqa: ANN401
    """The response of the server; `None` where another attempt may help."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"the judge's url must begin with http:// or https://, got {url!r}")
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(
        url.rstrip("/") + "/chat/completions", json.dumps(body).encode(), headers
    )
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            completion = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        if error.code in _RETRIED:
            return None
        raise ConfigError(
            f"the judge at {url} refuses: {error.code} {error.read(500).decode(errors='replace')}"
        ) from error
    except (OSError, ValueError):
        return None
    is_valid = isinstance(completion, dict) and completion.get("choices")
    return completion if is_valid else None


def _question(prompt: Prompt) -> str:
    text = prompt.fields.get("prompt", "")
    if isinstance(text, str):
        return text
    assert isinstance(text, list | tuple), "a prompt is text or a list of messages"
    return "\n\n".join(str(message["content"]) for message in text)
