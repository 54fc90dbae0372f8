"""The end of the page: what its words mean."""

from __future__ import annotations

from sortedrl.report.sections.frame import framed, paragraph


def section() -> str:
    """The definitions."""
    return framed(
        "How to read this",
        paragraph(
            "The bubble is the share of slot-seconds during rollouts in which a slot stood empty. "
            "Goodput is tokens trained on per second of rollout. "
            "A token is as stale as there were updates between the weights that wrote it and the "
            "weights that were trained on it."
        ),
        paragraph(
            "Seconds are seconds of training: neither an evaluation nor the time between a stop "
            "and a resume counts."
        ),
        paragraph(
            "One run per schedule and seed is one draw: small differences between curves say "
            "nothing before other seeds repeat them."
        ),
        name="reading",
    )
