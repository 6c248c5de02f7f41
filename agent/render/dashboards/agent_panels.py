"""The agents themselves: what they received, dropped and could not do."""

from agent.catalog import metrics as m
from agent.render.dashboards.panel_expressions import SHOWN, gauge, increase, rate
from agent.render.dashboards.panel_parts import Panel, PanelRow, PanelUnit, Query
from agent.render.dashboards.panel_styles import STAT
from agent.render.dashboards.shared_queries import sum_by
from agent.render.promql import by

_RECEIVING = (
    Panel(
        title="Agents",
        description="Each agent with its version; `simulated` is a demonstration, no real engine.",
        unit=PanelUnit.NUMBER,
        queries=(
            Query(
                expression=by(("agent", "version", "simulated"), gauge(m.AGENT_INFO), "max"),
                legend="{{agent}} {{version}} simulated={{simulated}}",
            ),
        ),
        style=STAT,
    ),
    Panel(
        title="Spans received",
        description="Spans by what became of them. Rejected ones are told by reason.",
        unit=PanelUnit.PER_SECOND,
        queries=(
            sum_by(("outcome",), rate(m.SPANS)),
            Query(
                expression=by(("reason",), rate(m.SPANS_REJECTED)), legend="rejected: {{reason}}"
            ),
            Query(
                expression=by(("reason",), rate(m.EXPORTS_REFUSED)),
                legend="whole exports refused: {{reason}}",
            ),
        ),
    ),
    Panel(
        title="Values stored as unknown",
        description="What engines and clients said that could not be true, by field.",
        unit=PanelUnit.PER_SECOND,
        queries=(sum_by(("field", "reason"), rate(m.VALUES_DROPPED)),),
    ),
    Panel(
        title="Figures of efficiency and cost that are missing",
        description="Why, by engine: no model's config, a GPU that the agent does not know, GPUs "
        "of several kinds. docs/efficiency.md says what to set.",
        unit=PanelUnit.NUMBER,
        queries=(sum_by(("engine", "reason"), increase(m.FIGURES_MISSING, SHOWN)),),
    ),
    Panel(
        title="Readings of engines' pages",
        description="By how they went. Anything but ok leaves a hole in the graphs above.",
        unit=PanelUnit.PER_SECOND,
        queries=(
            sum_by(("engine", "outcome"), rate(m.SCRAPES)),
            Query(expression=by(("reason",), rate(m.GPU_FAILURES)), legend="GPUs: {{reason}}"),
        ),
    ),
)
_KEEPING = (
    Panel(
        title="Waiting to be stored",
        description="Rows and records that wait for the database. It stays near 0 while the "
        "database keeps up.",
        unit=PanelUnit.NUMBER,
        queries=(
            Query(expression=f"sum({gauge(m.STORE_WAITING)})", legend="rows"),
            Query(expression=f"sum({gauge(m.PROXY_WAITING)})", legend="records of the proxy"),
            Query(expression=f"sum({gauge(m.PROXY_OPEN)})", legend="requests in the proxy"),
        ),
    ),
    Panel(
        title="What agents could not do",
        description="Writes that failed, requests that were proxied and not measured.",
        unit=PanelUnit.PER_SECOND,
        queries=(
            Query(expression=by(("what",), rate(m.STORE_FAILURES)), legend="store: {{what}}"),
            Query(expression=by(("reason",), rate(m.PROXY_FAILURES)), legend="proxy: {{reason}}"),
        ),
    ),
    Panel(
        title="Forwarding",
        description="OTLP bodies passed on, and those that were not.",
        unit=PanelUnit.PER_SECOND,
        queries=(
            Query(expression=f"sum({rate(m.FORWARDED)})", legend="passed on"),
            Query(expression=by(("reason",), rate(m.FORWARD_DROPPED)), legend="not: {{reason}}"),
        ),
    ),
    Panel(
        title="Waiting to be forwarded",
        description="Bytes of OTLP bodies that wait for their destination.",
        unit=PanelUnit.BYTES,
        queries=(Query(expression=f"sum({gauge(m.FORWARD_QUEUE)})", legend="bytes"),),
    ),
)

AGENT_ROW = PanelRow("The agents themselves", (*_RECEIVING, *_KEEPING), closed=True)
