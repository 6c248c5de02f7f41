"""The `objectives` commands: proposed from what was seen, and exchanged with other tools."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
import yaml

from agent.analysis.proposals import (
    MIN_REQUESTS,
    Proposal,
    Proposals,
    ProposedLimit,
    SeenRequest,
    propose,
    propose_from_bounds,
    share_for,
)
from agent.command_options import AgentUrl, AsJson, ConfigFile, Last, TokenFile
from agent.errors import SettingsInvalid
from agent.outputs.report.document import ReadApi
from agent.outputs.report.tables import Json
from agent.records.request import BY_CLIENT, FAILED
from agent.settings import load
from agent.settings.named_files import read_named_file
from agent.settings.settings_model import MAX_OBJECTIVE_NAME, MAX_OBJECTIVES
from agent.settings.values import did_you_mean
from agent.terminal import echo, progress_bar

objectives = typer.Typer(
    help="Propose objectives from what was seen, and exchange them with OpenSLO.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

_PAGE = 1000
_MOST_PAGES = 20


def _share_of(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0.5 <= share < 1:
        raise typer.BadParameter(f"{text!r} is not a share from 0.5 to below 1, such as 0.95")
    return share


Target = Annotated[
    float,
    typer.Option(
        parser=_share_of, metavar="SHARE", help="Share of the requests that must meet the limits."
    ),
]
Model = Annotated[str | None, typer.Option(metavar="NAME", help="Only requests of this model.")]
ByModel = Annotated[
    bool, typer.Option("--by-model", help="One objective for all input lengths of a model.")
]


@objectives.command("suggest")
def suggest(
    *,
    last: Last = "24h",
    target: Target = 0.95,
    model: Model = None,
    by_model: ByModel = False,
    url: AgentUrl = None,
    config: ConfigFile = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Propose limits, as YAML for the settings, with the share of the requests that kept them.

    From rows of requests; without enough of them, from the histograms of engines.

    Example: `objectives suggest --last 7d --url http://127.0.0.1:9470`.
    """
    from agent.agent_api import open_figures

    with open_figures(url, config, token_file) as read, progress_bar("reading", 2) as done:
        chosen = {} if model is None else {"model": model}
        summary = read("summary", window=last, **chosen)
        done()
        rows, is_part = _rows(read, summary["window_from"], chosen)
        done()
        found = propose(_seen(rows), target, most=MAX_OBJECTIVES, by_length=not by_model)
        counted = found if found.items else _from_engines(read, last, model, target)
        if not counted.items:
            most = max((*found.too_few.values(), *counted.too_few.values()), default=0)
            raise SettingsInvalid([_too_few(read, most, last, model)])
    if as_json:
        echo(json.dumps({"objectives": [asdict(each) for each in counted.items]}, indent=2))
    else:
        seen = f"the newest {len(rows):,} requests" if is_part else "requests"
        echo("\n".join(yaml_lines(counted, target, f"{seen} of the last {last}")))


class Format(StrEnum):
    """A kind of file that holds objectives."""

    OPENSLO = "openslo"
    SLOTH = "sloth"
    PYRRA = "pyrra"


@objectives.command("export")
def export(
    *,
    config: ConfigFile = None,
    kind: Annotated[
        Format, typer.Option("--format", help="OpenSLO v1, or the files of Sloth or of Pyrra.")
    ] = Format.OPENSLO,
    service: Annotated[
        str, typer.Option(metavar="NAME", help="The service that the objectives are of.")
    ] = "llm",
    as_json: AsJson = False,
) -> None:
    """Print the objectives of the settings as documents of OpenSLO, Sloth or Pyrra.

    Example: `objectives export --config agent.yml > slos.yml`.
    """
    from agent.render.openslo import FORMATS

    settings = load(config, os.environ)
    if not settings.objectives:
        raise SettingsInvalid(["the settings have no objectives; nobody promised the preset's"])
    documents = FORMATS[kind](settings.objectives, service)
    if as_json:
        echo(json.dumps({"documents": documents}, indent=2))
        return
    echo(yaml.safe_dump_all(documents, sort_keys=False, width=1000, allow_unicode=True).rstrip())


@objectives.command("import")
def import_(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="YAML files of OpenSLO v1.")
    ],
    *,
    as_json: AsJson = False,
) -> None:
    """Print the SLOs of OpenSLO documents as objectives for the settings.

    Limits on requests are annotations, such as `objective.goodput-agent/ttft_ms`, or a
    thresholdMetric on a latency. What the agent cannot say is refused.
    """
    from agent.render.openslo import objectives_in

    texts = [_text_of(file) for file in files]
    found, left = objectives_in(texts)
    if as_json:
        echo(json.dumps({"objectives": found, "remarks": left}, indent=2))
        return
    for remark in left:
        echo(f"# {remark}")
    echo(yaml.safe_dump({"objectives": found}, sort_keys=False, width=1000).rstrip())


def _text_of(file: Path) -> str:
    try:
        return read_named_file(file).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsInvalid([f"{file} cannot be read: {error}"]) from error


def _rows(read: ReadApi, since: str, chosen: Mapping[str, str]) -> tuple[list[Json], bool]:
    """The newest requests that started after a moment, and whether there are more."""
    rows: list[Json] = []
    cursor: str | None = None
    for _ in range(_MOST_PAGES):
        more: Mapping[str, str] = {} if cursor is None else {"cursor": cursor}
        page = read("requests", started_from=since, limit=_PAGE, **chosen, **more)
        rows += page["items"]
        cursor = page["next"]
        if cursor is None:
            break
    return rows, cursor is not None


def _seen(rows: Sequence[Json]) -> Iterator[SeenRequest]:
    """The requests that an objective judges."""
    for row in rows:
        if row["counted"] and row["status"] not in BY_CLIENT:
            yield SeenRequest(
                model=row["model"],
                input_tokens=row["input_tokens"],
                failed=row["status"] in FAILED,
                ttft_s=row["ttft_s"],
                tpot_s=row["tpot_s"],
            )


def _from_engines(read: ReadApi, last: str, model: str | None, target: float) -> Proposals:
    """Proposals from histograms: by model if the engines are known, else for all together."""
    served = {each["model"] for each in read("engines")["items"] if each["model"]}
    found, too_few = [], {}
    for name in [model] if model is not None else sorted(served) or [None]:
        chosen = {} if name is None else {"model": name}
        counts = read("summary", window=last, **chosen)["engine_counts"] or {}
        completed, failed = (round(counts.get(key) or 0) for key in ("completed", "failed"))
        upper = {each: _upper(values) for each, values in counts.get("latencies_ms", {}).items()}
        proposal = propose_from_bounds(name, upper, completed, failed, target)
        if proposal is None:
            too_few[name] = completed
        else:
            found.append(proposal)
    return Proposals(found[:MAX_OBJECTIVES], too_few)


def _upper(latency: Json) -> dict[str, float | None]:
    return {name: latency[name]["upper"] for name in ("p50", "p95", "p99")}


def _too_few(read: ReadApi, most: int, last: str, model: str | None) -> str:
    """Why there is no proposal, and what to do."""
    known = {each["group"] for each in read("breakdown", by="model", window=last)["groups"]}
    # Engines whose requests have no row.
    known |= {each["model"] for each in read("engines")["items"]}
    if model is not None and model not in known:
        close = did_you_mean(model, sorted(name for name in known if name))
        if close:
            return f"--model: no request of the last {last} is of {model!r}{close}"
    return (
        f"too few requests to propose limits: {most} of the last {last} have a latency, and a "
        f"model needs {MIN_REQUESTS}; wait for more, or give a longer --last"
    )


def yaml_lines(found: Proposals, target: float, of_what: str) -> Iterator[str]:
    """The section `objectives` of the settings, with what was seen as comments."""
    at_least = any(each.at_least for each in found.items)
    yield f"# Proposed by goodput-agent from {of_what}. Limits are a choice: change them."
    if at_least:
        yield "# From the engines' histograms: a limit is the upper edge of the bucket that the"
        yield "# percentile lies in, and the requests that kept it are at least so many."
    else:
        yield f"# Limits are the p{100 * share_for(target):.4g}, rounded up."
    for model, requests in found.too_few.items():
        yield f"# No proposal for {json.dumps(model)}: {requests} requests are too few."
    yield "objectives:"
    names: set[str] = set()
    for proposal in found.items:
        yield from _objective(proposal, target, _name(proposal, names))


def _objective(proposal: Proposal, target: float, name: str) -> Iterator[str]:
    yield f"- name: {json.dumps(name)}"
    yield f"  match: {_match(proposal)}"
    for limit in proposal.limits:
        yield f"  {limit.name}_ms: {limit.limit_ms:g}  # {_seen_of(limit)}"
    supported = _supported(proposal, target)
    more = "" if supported == target else f"; {target:g}, as asked for, was not kept"
    yield f"  target: {supported:g}  # {_kept(proposal)}{more}"


def _supported(proposal: Proposal, target: float) -> float:
    """The target, or the share that kept the limits if it is less: nobody can promise more."""
    if proposal.attainment >= target - 1e-9:
        return target
    return _rounded_down(proposal.attainment) or proposal.attainment


def _match(proposal: Proposal) -> str:
    """A mapping of YAML; characters that are special in a glob match themselves."""
    model = "*" if proposal.model is None else re.sub(r"([*?[])", r"[\1]", proposal.model)
    lengths = {
        "min_input_tokens": proposal.min_input_tokens,
        "max_input_tokens": proposal.max_input_tokens,
    }
    rest = "".join(f", {key}: {value}" for key, value in lengths.items() if value is not None)
    return f"{{model: {json.dumps(model)}{rest}}}"


def _seen_of(limit: ProposedLimit) -> str:
    upto = "up to " if limit.at_least else ""
    seen = [f"{name} {upto}{_ms(value)}" for name, value in limit.seen_ms.items()]
    return f"{', '.join(seen)} ms; {_share(limit.attainment, at_least=limit.at_least)} kept it"


def _kept(proposal: Proposal) -> str:
    share = _share(proposal.attainment, at_least=proposal.at_least)
    failed = f", {proposal.failed:,} failed" if proposal.failed else ""
    return f"{share} of {proposal.requests:,} requests met it{failed}"


def _ms(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def _share(share: float, *, at_least: bool) -> str:
    return f"{'at least ' if at_least else ''}{100 * _rounded_down(share):g} %"


def _rounded_down(share: float) -> float:
    """To a tenth of a percent, or finer near 1: no promise is better than what was seen."""
    steps = 1000 if share < 0.999 else 100_000
    return int(share * steps + 1e-6) / steps


def _name(proposal: Proposal, names: set[str]) -> str:
    """A name that the settings accept, and that no other proposal has; it is added to `names`."""
    model = re.sub(r"[^A-Za-z0-9_.-]+", "-", (proposal.model or "").rpartition("/")[2]).strip("-")
    length = "" if proposal.min_input_tokens is None else f"-from-{proposal.min_input_tokens}"
    begin = (model or "all")[: MAX_OBJECTIVE_NAME - len(length) - 3]
    free = (f"{begin}{number}{length}" for number in ("", *(f"-{n}" for n in range(2, 99))))
    name = next(each for each in free if each not in names)
    names.add(name)
    return name
