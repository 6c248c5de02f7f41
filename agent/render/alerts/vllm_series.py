"""vLLM's own series, by the facts that they stand for."""

from agent.catalog.engines.vllm import VLLM
from agent.catalog.metric import Metric
from agent.render.promql import Matcher

# The labels that say whose trouble it is, from the whole page to one engine.
ON_PAGE = ("instance",)
ON_MODEL = (*ON_PAGE, "model_name")
ON_ENGINE = (*ON_MODEL, "engine")


def spellings(metric: Metric) -> tuple[str, ...]:
    """What vLLM calls a fact, newest first."""
    return tuple(spelling.series for spelling in VLLM.facts[metric])


def own(series: str, *matchers: Matcher) -> str:
    """A series of an engine's own, as far as the matchers fit."""
    # A router may publish gauges under the engine's names, without this label.
    inside = ",".join(('engine!=""', *(matcher.text for matcher in matchers)))
    return f"{series}{{{inside}}}"
