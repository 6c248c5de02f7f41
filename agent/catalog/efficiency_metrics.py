"""The metrics of efficiency and cost.

Gauges are of an engine's newest stored minute. A late row changes the shares of minutes that were
published. Counters never go down: the next increments of the other shares are held back until the
total matches.
"""

from typing import Unpack

from agent.catalog.metric import Kind, Merge, Metric, MetricOptions, Unit

_OF = ("engine", "model")
_PHASE = (*_OF, "phase")


_NO_PEAK = "without a known model or GPU"
_NO_PHASE = "of a phase that did not occur, or without a known model or GPU"
_NO_PRICE = "without a price"
_NO_ENERGY = "if no energy counter is read"


def _gauge(name: str, text: str, *labels: str, **options: Unpack[MetricOptions]) -> Metric:
    options = {"merge": Merge.MAX, **options}
    return Metric(name=name, kind=Kind.GAUGE, help=text, labels=(*_OF, *labels), **options)


def _counter(name: str, text: str, *labels: str, **options: Unpack[MetricOptions]) -> Metric:
    return Metric(name=name, kind=Kind.COUNTER, help=text, labels=(*_OF, *labels), **options)


MFU = _gauge(
    "llm_mfu_ratio",
    "FLOP/s over the GPUs' dense peak, by phase and source; all but hardware are estimates.",
    "phase",
    "source",
    unit=Unit.RATIO,
    absent="without a known model or GPU, or if the source does not have them",
)
MBU = _gauge(
    "llm_mbu_ratio",
    "Bytes/s over memory bandwidth, by phase and source; all but hardware are estimates.",
    "phase",
    "source",
    unit=Unit.RATIO,
    absent="without a known model or GPU, or if the source does not have them",
)
INTENSITY = _gauge(
    "llm_roofline_flops_per_byte",
    "FLOPs per byte that had to move, by phase.",
    "phase",
    absent=_NO_PHASE,
)
RIDGE = _gauge(
    "llm_roofline_ridge_flops_per_byte",
    "FLOPs per byte above which work is compute-bound.",
    absent=_NO_PEAK,
)
ROOF_SHARE = _gauge(
    "llm_roofline_share_ratio",
    "FLOP/s over what the roofline allows at this intensity, by phase.",
    "phase",
    unit=Unit.RATIO,
    absent=_NO_PHASE,
)
BOUND = _gauge(
    "llm_roofline_bound",
    "1 for the bound of a phase: computing, memory bandwidth or memory capacity.",
    "phase",
    "bound",
    absent=_NO_PHASE,
)
DISAGREEMENT = _gauge(
    "llm_efficiency_disagreement_ratio",
    "How many times as high a figure is by one source as by another, beyond the margin.",
    "figure",
    "higher",
    "lower",
    "cause",
    unit=Unit.RATIO,
    absent="while sources agree",
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
    absent=_NO_PRICE,
)
COST_PER_MILLION = _gauge(
    "llm_cost_usd_per_million_tokens",
    "Dollars per million tokens: busy time for input and output, the whole bill for counted_output "
    "and within_objective.",
    "kind",
    absent="without a price, and without such tokens",
)
COST_PER_MILLION_GOOD = _gauge(
    "llm_cost_usd_per_million_good_tokens",
    "The whole bill per million output tokens of requests that met an objective, in dollars.",
    "objective",
    absent="without a price, and without such tokens",
)
COST_PER_REQUEST = _gauge(
    "llm_cost_usd_per_request",
    "The whole bill over the requests that ended and were worked on, in dollars.",
    absent="without a price, and without requests",
)
COST_PER_HOUR = _gauge(
    "llm_cost_usd_per_hour",
    "Dollars per hour at the rate of this minute.",
    absent=_NO_PRICE,
)
UNACCOUNTED_INPUT = _counter(
    "llm_unaccounted_input_tokens",
    "Prompt tokens that the engine counted and that are in no row.",
    absent="if the engine does not count them",
)
UNACCOUNTED_OUTPUT = _counter(
    "llm_unaccounted_output_tokens",
    "Output tokens that the engine counted and that are in no row.",
    absent="if the engine does not count them",
)
UNACCOUNTED_REQUESTS = _counter(
    "llm_unaccounted_requests",
    "Requests that the engine counted, each choice for itself, and that are in no row, by reason.",
    "reason",
    absent="until the first ledger is closed",
)
UNACCOUNTED_COST = _counter(
    "llm_unaccounted_cost_usd",
    "Dollars of busy time for work that is in no row, an estimate.",
    absent="without a price, and until the first ledger is closed",
)
ROWS_WITHOUT_TOKENS = _counter(
    "llm_rows_without_tokens",
    "Requests whose rows lack their tokens, which are in the unaccounted ones.",
    absent="until the first ledger is closed",
)
ENERGY = _counter(
    "llm_energy_joules",
    "Energy that the engine's GPUs drew.",
    unit=Unit.JOULES,
    absent=_NO_ENERGY,
)
ENERGY_PER_TOKEN = _gauge(
    "llm_energy_joules_per_output_token",
    "Energy of the engine's GPUs over its output tokens.",
    absent="if no energy counter is read, and without output",
)

EFFICIENCY_METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
