"""The `compare` command: is it better than before?"""

import os
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import Annotated

import typer

from agent.analysis.comparison.comparing import Comparison, Outcome, compare, compare_figures
from agent.analysis.comparison.run_columns import RunColumns, RunFigures
from agent.catalog.definitions import GOODPUT
from agent.command_options import AsJson, ConfigFile
from agent.outputs.comparison import json_text, markdown, print_comparison
from agent.records.objective import Objective
from agent.records.queries import Selection
from agent.settings import load
from agent.terminal import TerminalConsole, echo, progress_bar

EXIT_CODES = {Outcome.BETTER: 0, Outcome.NO_EVIDENCE: 0, Outcome.WORSE: 1}
CANNOT_TELL = 2


class OutputFormat(StrEnum):
    """How a comparison is printed."""

    TEXT = "text"
    MARKDOWN = "markdown"
    JSON = "json"


Before = Annotated[
    str,
    typer.Option(
        metavar="RUN",
        help="A window (2026-11-20, 2026-11-20T10:00/1h, 24h/1h, 1h), a database (sqlite:///a.db, "
        "a.db or postgresql://..., alone or with #WINDOW), or a result file of vllm bench serve, "
        "AIPerf or GuideLLM.",
    ),
]
After = Annotated[str, typer.Option(metavar="RUN", help="The same, of the run afterwards.")]
Name = Annotated[
    str | None, typer.Option(metavar="NAME", help="Only requests of this one, of a database.")
]
Limit = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        max=86_400_000,
        metavar="MS",
        help="Limit for goodput, of a result file, in milliseconds.",
    ),
]
Target = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        max=1.0,
        metavar="SHARE",
        help="Share of requests of a result file that must keep these limits, such as 0.95.",
    ),
]
Format = Annotated[
    OutputFormat,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="text, markdown (for a comment on a pull request), or json.",
    ),
]


def compare_runs(
    *,
    before: Before,
    after: After,
    config: ConfigFile = None,
    engine: Name = None,
    model: Name = None,
    tenant: Name = None,
    objective: Name = None,
    ttft_ms: Limit = None,
    tpot_ms: Limit = None,
    e2e_ms: Limit = None,
    target: Target = None,
    output: Format = OutputFormat.TEXT,
    as_json: AsJson = False,
) -> None:
    """Compare two runs: is any figure better or worse than before, beyond chance?

    Exits with 0 if nothing is worse, 1 if anything is, and 2 if that cannot be told: the load
    changed, one period makes the difference, or there is too little to judge by.

    Examples: `compare --before 24h/1h --after 1h`, and
    `compare --before old.json --after new.json --ttft-ms 300 --format markdown`.
    """
    from agent.compared_runs import RunOptions, open_run

    options = RunOptions(
        url=cache(lambda: load(config, os.environ).storage.read_url),
        now=datetime.now(UTC),
        chosen=Selection(engine=engine, model=model, tenant=tenant, objective=objective),
        objective=_objective(ttft_ms, tpot_ms, e2e_ms, target),
        target=target,
    )
    with progress_bar("comparing", 3) as done:
        runs = []
        for given in (before, after):
            runs.append(open_run(given, options))
            done()
        found = _compared(*runs)
    raise _printed(found, OutputFormat.JSON if as_json else output)


def _objective(
    ttft_ms: float | None, tpot_ms: float | None, e2e_ms: float | None, target: float | None
) -> Objective | None:
    """Without limits a request that succeeds meets the objective."""
    limits_ms = (ttft_ms, tpot_ms, e2e_ms)
    if target is None and all(limit is None for limit in limits_ms):
        return None
    ttft_s, tpot_s, e2e_s = (None if limit is None else limit / 1000 for limit in limits_ms)
    return Objective(
        name="compare",
        definition=GOODPUT,
        target=1.0 if target is None else target,
        window_s=1.0,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=e2e_s,
    )


def _compared(first: RunColumns | RunFigures, second: RunColumns | RunFigures) -> Comparison:
    if isinstance(first, RunColumns) and isinstance(second, RunColumns):
        return compare(first, second)
    return compare_figures(first, second)


def _printed(comparison: Comparison, output: OutputFormat) -> typer.Exit:
    if output is OutputFormat.TEXT:
        print_comparison(comparison, TerminalConsole())
    elif output is OutputFormat.MARKDOWN:
        echo(markdown(comparison), nl=False)
    else:
        echo(json_text(comparison))
    return typer.Exit(EXIT_CODES.get(comparison.outcome, CANNOT_TELL))
