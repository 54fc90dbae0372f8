"""Whether coupled mode can be had in vLLM: what comes out exactly, and what it costs.

    python benchmarks/coupled_outside.py                          minutes on two cores
    python benchmarks/coupled_outside.py --model FOLDER --json result.json

Run it with a Python that has vLLM (its CPU build will do) and with `src` on PYTHONPATH. A tiny
random Llama in fp32 writes answers in our engine and in vLLM, where a logits processor brings our
noise into greedy decoding. Then the weights change, and the cached tokens are verified: by our
engine, and from vLLM's prompt log-probabilities with the noise added on the host. Costs are
measured on the tiny model and on FOLDER, a model with a real vocabulary.

With only the k largest log-probabilities, a token outside them can still win by its noise. Where
some noise is large enough for that the verdict is open, and the answer is cut there: this stays
exact, because what follows is written again with the same noise.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outside_study.finding import Finding

COST_ANSWERS = 64


def measure(folder: Path, *, answers: int, model: Path | None) -> Iterator[Finding]:
    """Every finding, as it is made; `folder` is scratch."""
    from outside_study.costs import study_costs
    from outside_study.decoding import study_decoding, study_drafts
    from outside_study.questions import question_prompts
    from outside_study.seeds import study_seeds
    from outside_study.verification import study_verification
    from outside_study.world import make_world

    world = make_world(folder, answers=answers)
    yield from study_decoding(world)
    yield from study_verification(world)
    yield from study_seeds(world)
    prompts = [t.prompt.tokens for t in world.trajectories[:COST_ANSWERS]]
    yield from study_costs(world.old_folder, prompts)
    if model is not None:
        yield from study_costs(model, question_prompts(model))
    # Last, because a refused engine leaves vLLM unable to start another in this process.
    yield from study_drafts(world)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--model", type=Path, help="a model for the costs of a real vocabulary")
    parser.add_argument("--json", type=Path)
    settings = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory() as folder:
        for finding in measure(Path(folder), answers=settings.answers, model=settings.model):
            findings.append(finding)
            print(finding, flush=True)
    if settings.json is not None:
        settings.json.write_text(json.dumps([asdict(f) for f in findings], indent=2) + "\n")


if __name__ == "__main__":
    main()
