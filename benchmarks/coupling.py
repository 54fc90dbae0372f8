"""How much of a cached answer survives an update in coupled mode, on a real model.

    python benchmarks/coupling.py --model FOLDER                     minutes on an H200
    python benchmarks/coupling.py --model FOLDER --quick             minutes on one core
    python benchmarks/coupling.py --model FOLDER --json result.json

A model is trained in fp32 with AdamW. Copies of its weights in fp32, fp16 and bf16, rounded plainly
or held (coupling_study/copies.py), generate answers at version 0 and verify them after each update:
the share of an answer that is kept at each tolerance, the tokens that a tolerance admits, and the
distance of each copy from the trained weights. A copy that hardly moves keeps much and follows
little: look at both.

On the CPU the engine also rounds the logits of 16-bit weights to 16 bits; on a GPU they stay in
fp32, so only GPU numbers are representative of fp16 and bf16.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from coupling_study.settings import parse
from provenance import provenance

if TYPE_CHECKING:
    from coupling_study.settings import Arithmetic, Settings
    from coupling_study.study import Findings, Study


def violations(findings: Findings, *, device: str) -> list[str]:
    """Guarantees of the engine for batches and tolerances that did not hold.

    It guarantees the same bits for a row in any batch, in fp32 on the CPU and in 16 bits on a GPU.
    """
    promised: set[Arithmetic] = {"fp16", "bf16"} if device.startswith("cuda") else {"fp32"}
    unequal = [
        f"{b.rule}: unchanged weights keep {b.unchanged:.4%}, not all"
        for b in findings.beginnings
        if b.rule.arithmetic in promised and b.unchanged < 1
    ]
    differing = [
        f"{c.rule}: the engine keeps other tokens than the gaps say in {c.differing} of "
        f"{c.answers} answers"
        for c in findings.confirmations
        if c.rule.arithmetic in promised and c.differing
    ]
    return unequal + differing


def save(study: Study, settings: Settings, *, seconds: float) -> None:
    """Write the findings so far to the file in the settings."""
    from coupling_study.recommend import recommend

    if settings.json is None:
        return
    result = {
        **provenance(study.device),
        "settings": asdict(settings),
        "seconds": seconds,
        **asdict(study.findings),
        "recommendations": [asdict(one) for one in recommend(study.findings, settings)],
    }
    settings.json.write_text(json.dumps(result, indent=2, default=str) + "\n")


def main() -> None:
    """Measure and print."""
    settings = parse(sys.argv[1:], description=__doc__)
    import torch
    from transformers.utils.logging import disable_progress_bar

    from coupling_study.recommend import recommend
    from coupling_study.study import Study
    from coupling_study.tables import Tables

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    disable_progress_bar()
    began = time.perf_counter()
    study = Study(settings)
    for seed in settings.seeds:
        study.run(seed)
        # A run stopped between two seeds keeps its findings.
        save(study, settings, seconds=time.perf_counter() - began)
    Tables(study.findings, settings).show(recommend(study.findings, settings))
    broken = violations(study.findings, device=study.device)
    if broken:
        raise SystemExit("\n".join(broken))


if __name__ == "__main__":
    main()
