"""What an engine can be asked to write, whichever engine it is."""

from __future__ import annotations

from itertools import chain

from sortedrl.errors import RequestError
from sortedrl.types import Trajectory


def checked_limit(trajectory: Trajectory, max_tokens: int, *, vocabulary: int, context: int) -> int:
    """The tokens its answer may have within the model's context.

    A trajectory that can never be written is refused.
    """
    name = f"trajectory {trajectory.key}"
    prompt_tokens = len(trajectory.prompt.tokens)
    if not prompt_tokens:
        raise RequestError(f"{name} has an empty prompt; give it at least one token")
    written = chain.from_iterable(segment.tokens for segment in trajectory.segments)
    for token in chain(trajectory.prompt.tokens, written):
        if not 0 <= token < vocabulary:
            raise RequestError(
                f"{name}: token ids must lie in 0..{vocabulary - 1}, got {token}; "
                "was it made with the tokenizer of this model?"
            )
    if max_tokens < 1:
        raise RequestError(f"{name}: an answer must be allowed at least 1 token, got {max_tokens}")
    if prompt_tokens >= context:
        raise RequestError(
            f"{name}: its prompt has {prompt_tokens} tokens, the model's context has "
            f"{context}, and one must be left for the answer; shorten or drop it"
        )
    return min(max_tokens, context - prompt_tokens)
