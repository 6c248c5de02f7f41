"""The `report` command: the figures of a window, or its statement, for a person or a pipeline."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated

import typer

from agent.analysis.cost.bill import StatementLine, share_in_window, statement
from agent.command_options import (
    AgentUrl,
    AsJson,
    ConfigFile,
    LastOrNone,
    TokenFile,
    write_text,
)
from agent.errors import SettingsInvalid
from agent.outputs.report.document import (
    READS,
    ReadApi,
    ReportDocument,
    document_of,
    read_figures,
    warnings_of,
)
from agent.outputs.report.formats import as_json, html_page, markdown, text, values_json
from agent.outputs.report.statements import (
    CURRENCY,
    as_csv,
    as_focus,
    as_table,
    as_values,
    bill_of,
    groups_of,
    period_of,
)
from agent.outputs.report.tables import Json
from agent.outputs.report.texts import moment
from agent.terminal import echo, progress_bar, without_controls

_MOST_GROUPS = 1000


class ReportFormat(StrEnum):
    """The format of a report."""

    TEXT = "text"
    MARKDOWN = "markdown"
    HTML = "html"
    JSON = "json"
    CSV = "csv"
    FOCUS = "focus"


_TABLES = (ReportFormat.CSV, ReportFormat.FOCUS)


class StatementBy(StrEnum):
    """Whom the lines of a statement are for."""

    TENANT = "tenant"
    USER = "user"
    WORKLOAD = "workload"
    MODEL = "model"
    ENGINE = "engine"


Shape = Annotated[
    ReportFormat,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="text, markdown, html (one file with charts, for mail), json, or of a statement csv "
        "or focus (FOCUS 1.2, as CSV).",
    ),
]
AsStatement = Annotated[
    bool, typer.Option("--statement", help="A statement of cost that adds up to the bill.")
]
By = Annotated[
    StatementBy,
    typer.Option(
        metavar="GROUP",
        help="Whom the lines of a statement are for: tenant, user, workload, model or engine.",
    ),
]
Width = Annotated[
    int | None,
    typer.Option(
        min=60, max=1000, metavar="COLUMNS", help="Columns of text. Default: the terminal's."
    ),
]
OutputFile = Annotated[Path | None, typer.Option(help="Write to this file.", dir_okay=False)]


From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="MOMENT",
        help="Begin of the window: 2026-11-28T02:10, Unix seconds, or as in now-8h. Times are UTC.",
    ),
]
Until = Annotated[
    str | None, typer.Option(metavar="MOMENT", help="End of the window, now if it is absent.")
]


def report(
    *,
    last: LastOrNone = None,
    begin: From = None,
    until: Until = None,
    shape: Shape = ReportFormat.TEXT,
    json: AsJson = False,
    as_statement: AsStatement = False,
    by: By = StatementBy.TENANT,
    url: AgentUrl = None,
    config: ConfigFile = None,
    token_file: TokenFile = None,
    width: Width = None,
    output: OutputFile = None,
) -> None:
    """Report on the last hour or another window: objectives, latency, causes, cost, events.

    Examples: `report --last 24h --format html --output day.html`,
    `report --from 2026-11-28T02:10 --until 2026-11-28T02:40`, and
    `report --statement --by tenant --last 30d --format csv`.
    """
    shape = ReportFormat.JSON if json else shape
    if shape in _TABLES and not as_statement:
        raise SettingsInvalid([f"--format {shape}: only a statement is a table; add --statement"])
    asked = {"window": last, "from": begin, "until": until}
    window = {name: value for name, value in asked.items() if value} or {"window": "1h"}
    columns = width or get_terminal_size((100, 24)).columns
    reads = 2 if as_statement else READS
    from agent.agent_api import open_figures

    with open_figures(url, config, token_file) as read, progress_bar("reading", reads) as done:
        if as_statement:
            made = _statement(read, window, by, shape, done, columns=columns)
        else:
            made = _report(read, window, shape, done, columns=columns)
    if output is None:
        echo(made, nl=False)
    else:
        # Somebody may print the file.
        write_text("--output", output, without_controls(made))


def _report(
    read: ReadApi,
    window: Mapping[str, str],
    shape: ReportFormat,
    done: Callable[[], None],
    *,
    columns: int,
) -> str:
    figures = read_figures(read, window, done)
    if shape is ReportFormat.JSON:
        return as_json(figures)
    return _written(document_of(figures), shape, columns)


def _written(document: ReportDocument, shape: ReportFormat, columns: int) -> str:
    if shape is ReportFormat.HTML:
        return html_page(document)
    return markdown(document) if shape is ReportFormat.MARKDOWN else text(document, columns)


def _statement(
    read: ReadApi,
    window: Mapping[str, str],
    by: StatementBy,
    shape: ReportFormat,
    done: Callable[[], None],
    *,
    columns: int,
) -> str:
    groups = read("breakdown", by=by.value, **window, cost="true", limit=_MOST_GROUPS)
    done()
    summary = read("summary", **window)
    done()
    found, bill = groups_of(groups), bill_of(summary)
    lines = statement(by.value, found, bill)
    part = 1.0 if bill is None else share_in_window(found, bill)
    warnings, notes = list(warnings_of(summary)), list(_notes(summary, groups, part))
    period = period_of(summary)
    if shape in _TABLES:
        for note in (*warnings, *notes):
            echo(f"goodput-agent: {note}", err=True)
        is_focus = shape is ReportFormat.FOCUS
        return as_focus(by.value, lines, period) if is_focus else as_csv(lines, period)
    if shape is ReportFormat.JSON:
        of = {"period_begin": period.begin, "period_end": period.end, "currency": CURRENCY}
        values = {"by": by.value, **of, "lines": as_values(lines), "notes": warnings + notes}
        return values_json(values)
    return _written(_statement_document(summary, lines, warnings, notes), shape, columns)


def _statement_document(
    summary: Json, lines: Sequence[StatementLine], warnings: Sequence[str], notes: Sequence[str]
) -> ReportDocument:
    return ReportDocument(
        title="goodput-agent statement",
        window=f"{moment(summary['window_from'])} to {moment(summary['window_until'])} UTC",
        sentences=(),
        warnings=warnings,
        tables=(as_table(lines, notes),),
        charts=(),
    )


def _notes(summary: Json, groups: Json, part: float) -> Iterator[str]:
    """What a reader must know before paying."""
    cost = summary["cost"]
    if cost is None:
        yield (
            "no minute of this window has both a price and a known number of GPUs, so there is no "
            "bill; see docs/cost.md"
        )
    else:
        counted = f"{moment(cost['counted_from'])} to {moment(cost['counted_until'])} UTC"
        yield f"the bill is of the minutes from {counted}"
        if cost["unpriced_s"]:
            yield f"{cost['unpriced_s']:.0f} s without a price are in no line"
        if part < 1:
            yield f"requests pay {part:.2%} of their cost; the rest was before the window began"
    if groups["left_out"]:
        yield f"{groups['left_out']} groups with fewer requests are in `other requests`"
    yield (
        "cost is summed from rows; those older than storage.keep_requests have expired and are "
        "in `other requests`"
    )
