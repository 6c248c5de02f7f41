"""How often each GPU had each Xid, and when it had it last. It outlives the driver."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping

from agent.catalog import gpu_facts as f
from agent.catalog.xids import COUNTED_XIDS
from agent.records.gpu import Facts
from agent.sources.nvml.fields import Key


class XidTally:
    """Counts from one thread, read in another. A GPU that was never watched has no counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[int]] = {}
        self._facts: dict[str, Facts] = {}

    def watch(self, gpus: Iterable[str]) -> None:
        """From now on the errors of these GPUs are counted."""
        with self._lock:
            for gpu in gpus:
                self._counts.setdefault(gpu, Counter(dict.fromkeys(COUNTED_XIDS, 0)))
                self._tell(gpu, {})

    def seen(self, gpu: str, xid: int, at: float) -> int:
        """Count one error at a Unix time; how many that makes."""
        with self._lock:
            self._counts.setdefault(gpu, Counter())[xid] += 1
            self._tell(gpu, {(f.XID_LAST_SEEN.name, (str(xid),)): at})
            return self._counts[gpu][xid]

    def facts(self, gpu: str) -> Facts:
        """The counts as facts."""
        return self._facts.get(gpu, {})

    def _tell(self, gpu: str, news: Mapping[Key, float]) -> None:
        # A new mapping each time, so that readers need no lock.
        counts: dict[Key, float] = {
            (f.XID_ERRORS.name, (str(xid),)): float(count)
            for xid, count in self._counts[gpu].items()
        }
        self._facts[gpu] = {**self._facts.get(gpu, {}), **counts, **news}
