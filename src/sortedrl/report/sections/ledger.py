"""The part of the page about tokens: what became of everything that was decoded."""

from __future__ import annotations

from collections.abc import Sequence

from sortedrl.evaluation.tables import percent
from sortedrl.report.axis import short
from sortedrl.report.flow import flows
from sortedrl.report.record import Run
from sortedrl.report.sections.frame import figure, framed
from sortedrl.report.sections.remarks import remarks


def section(runs: Sequence[Run]) -> str:
    """The token ledger of each run as a flow."""
    caption = (
        "Bands are as thick as their tokens, on one scale for all runs. Every decoded token is "
        "trained on, thrown away, or still cached. Tokens kept at resumes were not decoded again; "
        "those prefilled again were read once more, prompts included, to go on from them."
    )
    ledgers = [(run.name, run.metrics.run.ledger) for run in runs]
    told = remarks(((run.name, ledger_words(run)) for run in runs), are_named=len(runs) > 1)
    return framed(
        "Where the tokens went",
        told,
        figure(caption, flows(ledgers, title="Token ledger")),
        name="ledger",
    )


def ledger_words(run: Run) -> str:
    """In a sentence, what one token trained on cost."""
    ledger = run.metrics.run.ledger
    if not ledger.decoded:
        return "no stretch of writing has ended yet."
    if not ledger.trained:
        return f"{ledger.decoded:,} tokens decoded, none trained on yet."
    if ledger.trained == ledger.decoded:
        return "every decoded token was trained on."
    trained = percent(ledger.trained / ledger.decoded)
    if ledger.discarded == 0:
        thrown = "none was thrown away"
    else:
        ratio = short(100 * ledger.discarded / ledger.trained)
        thrown = f"{ratio} were thrown away for every 100 trained on"
    return f"{trained} of the decoded tokens were trained on; {thrown}."
