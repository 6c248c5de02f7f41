"""Adds an engine's limits to its samples, from the settings or from its command line."""

from collections.abc import Mapping
from dataclasses import replace

from agent.catalog.engine_facts import DATA_PARALLEL_RANKS
from agent.catalog.engine_flags import LIMIT_FLAGS
from agent.catalog.metric import Merge
from agent.records.engine import EngineSample
from agent.records.host import HostSample


class EngineLimits:
    """Adds limits to samples: the exposition's value first, then the settings', then the flag's."""

    def __init__(self, configured: Mapping[str, int]) -> None:
        """`configured` has the limits of the settings by fact name, of one data-parallel rank."""
        self._configured = configured
        self._flags: Mapping[str, int] = {}

    def host_sample(self, sample: HostSample) -> None:
        """Keep the flags of the running engine; a stopped engine keeps its last known flags."""
        if sample.processes:
            self._flags = sample.limits

    def added_to(self, sample: EngineSample) -> EngineSample:
        """The sample with the limits that are known and not in it."""
        known = {**self._flags, **self._configured}
        ranks = sample.fact(DATA_PARALLEL_RANKS.name) or 1.0
        limits: dict[tuple[str, tuple[str, ...]], float] = {
            (limit.name, ()): known[limit.name] * (ranks if limit.merge is Merge.SUM else 1.0)
            for limit in LIMIT_FLAGS
            if limit.name in known
        }
        return replace(sample, facts={**limits, **sample.facts})
