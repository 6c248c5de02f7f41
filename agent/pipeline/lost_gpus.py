"""GPUs that were there before the agent was started, and are not any more or cannot be seen."""

import threading
from collections.abc import Iterable
from dataclasses import replace

from agent.catalog.gpu_facts import UP
from agent.records.gpu import GpuSample

# As sources say it of a GPU that they read before.
GPU_MISSING = "gpu_missing"


class LostGpus:
    """Knows the GPUs of an earlier run, for sources know only those that they read themselves.

    None is missed before the source answered: a driver takes seconds to load, and an exporter may
    start later. Until then none is seen, for the reason that the source gives. Where a GPU is read
    that the earlier run did not have, the agent was given others, perhaps on another machine, and
    no GPU is missed. Safe to use from several threads.
    """

    def __init__(self, known: Iterable[GpuSample] = ()) -> None:
        """`known` are the last good readings of the earlier run, one of each GPU."""
        self._known = {sample.gpu: sample for sample in known}
        self._seen: set[str] = set()
        self._told: set[str] = set()
        self._answered = False
        self._blind: str | None = None
        self._lock = threading.Lock()

    @property
    def answered(self) -> bool:
        """Whether the source read a GPU or found that there is none."""
        with self._lock:
            return self._answered

    def sample(self, sample: GpuSample) -> None:
        """A source read a GPU, or lost one that it had read."""
        with self._lock:
            self._seen.add(sample.gpu)
            self._answered = True

    def none_there(self) -> None:
        """A source that works finds no GPU."""
        with self._lock:
            self._answered = True

    def none_seen(self, why: str) -> None:
        """A source cannot see any GPU, for a short word."""
        with self._lock:
            self._blind = why

    def not_missed(self) -> set[str]:
        """The GPUs that were told until others took their place, each once."""
        with self._lock:
            if not self._answered:
                return set()
            gone = self._told - self._gone() - self._seen
            self._told -= gone
            return gone

    def _gone(self) -> set[str]:
        if not self._answered or self._seen - self._known.keys():
            return set()
        return self._known.keys() - self._seen

    def lost(self, now: float) -> list[GpuSample]:
        """What is to be told at a Unix time of each GPU that did not come back."""
        with self._lock:
            gone = self._gone()
            self._told |= gone
            return [self._unread(gpu, now, GPU_MISSING) for gpu in sorted(gone)]

    def unseen(self, now: float) -> list[GpuSample]:
        """What is to be told at a Unix time of each GPU while the source says why it sees none."""
        with self._lock:
            if self._answered or self._blind is None:
                return []
            self._told |= self._known.keys()
            return [self._unread(gpu, now, self._blind) for gpu in sorted(self._known)]

    def before(self) -> list[GpuSample]:
        """The last good readings of the earlier run."""
        return list(self._known.values())

    def _unread(self, gpu: str, now: float, problem: str) -> GpuSample:
        return replace(
            self._known[gpu],
            at=now,
            facts={(UP.name, ()): 0.0},
            processes=None,
            mig_instances=(),
            problem=problem,
        )
