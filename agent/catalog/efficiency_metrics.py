"""The metrics of efficiency and cost.

Gauges are of an engine's newest booked minute. A late row changes the shares of minutes that were
published. Counters never go down: the next increments of the other shares are held back until the
total matches.
"""

from agent.catalog.metric import Kind, Merge, Metric, Unit

_OF = ("engine", "model")
_PHASE = (*_OF, "phase")


def _gauge(name: str, text: str, *labels: str, unit: Unit = Unit.NONE) -> Metric:
    labels = (*_OF, *labels)
    return Metric(name=name, kind=Kind.GAUGE, help=text, labels=labels, unit=unit, merge=Merge.MAX)


def _counter(name: str, text: str, *labels: str, unit: Unit = Unit.NONE) -> Metric:
    return Metric(name=name, kind=Kind.COUNTER, help=text, labels=(*_OF, *labels), unit=unit)


MFU = _gauge(
    "llm_mfu_ratio",
    "FLOP/s over the GPUs' dense peak, by phase and source; requests and engine are estimates.",
    "phase",
    "source",
    unit=Unit.RATIO,
)
MBU = _gauge(
    "llm_mbu_ratio",
    "Bytes/s over memory bandwidth, by phase and source; requests and engine are estimates.",
    "phase",
    "source",
    unit=Unit.RATIO,
)
INTENSITY = _gauge(
    "llm_roofline_flops_per_byte", "FLOPs per byte that had to move, by phase.", "phase"
)
RIDGE = _gauge(
    "llm_roofline_ridge_flops_per_byte", "FLOPs per byte above which work is compute-bound."
)
ROOF_SHARE = _gauge(
    "llm_roofline_share_ratio",
    "FLOP/s over what the roofline allows at this intensity, by phase.",
    "phase",
    unit=Unit.RATIO,
)
BOUND = _gauge(
    "llm_roofline_bound",
    "1 for the bound of a phase: computing, memory bandwidth or memory capacity.",
    "phase",
    "bound",
)
DISAGREEMENT = _gauge(
    "llm_efficiency_disagreement_ratio",
    "How many times as high a figure is by one source as by another, beyond the margin.",
    "figure",
    "higher",
    "lower",
    "cause",
    unit=Unit.RATIO,
)
TIME = _counter(
    "llm_engine_time_seconds",
    "Time of an engine by state: busy, idle, or unknown without samples.",
    "state",
    unit=Unit.SECONDS,
)
COST = _counter(
    "llm_cost_usd",
    "Dollars for the GPUs by share; all shares together are the bill.",
    "share",
)
COST_PER_MILLION = _gauge(
    "llm_cost_usd_per_million_tokens",
    "Dollars per million tokens: busy time for input and output, the bill for within_objective.",
    "kind",
)
COST_PER_MILLION_GOOD = _gauge(
    "llm_cost_usd_per_million_good_tokens",
    "The whole bill per million output tokens of requests that met an objective, in dollars.",
    "objective",
)
COST_PER_REQUEST = _gauge(
    "llm_cost_usd_per_request",
    "The whole bill over the requests that ended and were worked on, in dollars.",
)
COST_PER_HOUR = _gauge("llm_cost_usd_per_hour", "Dollars per hour at the rate of this minute.")
UNACCOUNTED_INPUT = _counter(
    "llm_unaccounted_input_tokens", "Prompt tokens that the engine counted and no row tells of."
)
UNACCOUNTED_OUTPUT = _counter(
    "llm_unaccounted_output_tokens", "Output tokens that the engine counted and no row tells of."
)
UNACCOUNTED_REQUESTS = _counter(
    "llm_unaccounted_requests",
    "Requests that the engine counted, each choice for itself, and no row tells of, by reason.",
    "reason",
)
UNACCOUNTED_COST = _counter(
    "llm_unaccounted_cost_usd", "Dollars of busy time for work that no row tells of, an estimate."
)
UNTOLD_ROWS = _counter(
    "llm_untold_rows", "Requests whose rows lack their tokens, which are in the unaccounted ones."
)
ENERGY = _counter("llm_energy_joules", "Energy that the engine's GPUs drew.", unit=Unit.JOULES)
ENERGY_PER_TOKEN = _gauge(
    "llm_energy_joules_per_output_token", "Energy of the engine's GPUs over its output tokens."
)

EFFICIENCY_METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
