"""A C library with NVML's binary interface, built here and scripted, and a source over it."""

import ctypes
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pynvml  # type: ignore[import-untyped]

from agent.records.gpu import GpuSample, GpuSamples, XidError
from agent.sources.nvml.source import NvmlSource
from tests.real_parts.waiting import eventually

SOURCES = Path(__file__).with_name("standin")
FILE_NAME = "libnvidia-ml.so.1"
MIB = 1024 * 1024
ARRIVES_WITHIN_S = 20.0


def build(folder: Path, *flags: str) -> Path:
    """The library, compiled into `folder` under the name that the binding loads."""
    library = folder / FILE_NAME
    warnings = ("-Wall", "-Wextra", "-Werror")
    shape = ("-shared", "-fPIC", "-pthread", "-Wl,-Bsymbolic", "-std=gnu11", "-O1")
    sources = sorted(SOURCES.glob("*.c"))
    subprocess.run(["gcc", *shape, *warnings, *flags, "-o", library, *sources], check=True)
    return library


def gpu_uuid(index: int) -> str:
    return f"GPU-00000000-0000-4000-8000-{index:012d}"


def mig_uuid(index: int, instance: int) -> str:
    return f"MIG-00000000-0000-4000-8000-{index:06d}{instance:06d}"


class FakeDriver:
    """The library in this process. What can be scripted is listed in script.c."""

    def __init__(self, library: Path) -> None:
        # Not by its name: a library that is found by name would serve every later test too.
        self.library = ctypes.CDLL(str(library))

    def do(self, *lines: str) -> None:
        for line in lines:
            assert self.library.standin_do(line.encode()) == 0, f"not understood: {line}"

    def calls(self, function: str) -> int:
        """How often a function was called since the last `gpus` line."""
        return int(self.library.standin_calls(function.encode()))

    def install(self) -> None:
        """Let the binding call this library, as if it had loaded it."""
        pynvml.nvmlLib = self.library
        pynvml._nvmlGetFunctionPointer_cache.clear()


@dataclass
class ScriptedNvml:
    """Each poll is a second after the last, by the source's clocks."""

    driver: FakeDriver
    timeout_s: float = ARRIVES_WITHIN_S
    last: GpuSamples = field(default_factory=GpuSamples)
    xids: deque[XidError] = field(default_factory=deque)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.source = NvmlSource(
            clock=lambda: self.now,
            monotonic=lambda: self.now,
            timeout_s=self.timeout_s,
            event_wait_ms=20,
        )

    @property
    def samples(self) -> list[GpuSample]:
        return list(self.last.samples)

    @property
    def failures(self) -> list[str]:
        return list(self.last.failures)

    def poll(self, *script: str, after_s: float = 1.0) -> None:
        self.driver.do(*script)
        self.now += after_s
        self.last = self.source.read(self.now)
        self.xids += self.last.xids

    def close(self) -> None:
        """Close the source, and wait for the calls that a driver still holds."""
        self.driver.do("release")
        self.source.close()
        self.source._worker._thread.join(ARRIVES_WITHIN_S)

    def of(self, index: int = 0) -> GpuSample:
        (found,) = [sample for sample in self.samples if sample.gpu == gpu_uuid(index)]
        return found

    def fact(self, name: str, *labels: str, index: int = 0) -> float | None:
        return self.of(index).fact(name, *labels)

    def next_xid(self) -> XidError:
        """The next Xid that a read returns; waits for it."""

        def arrived() -> bool:
            self.xids += self.source.read(self.now).xids
            return bool(self.xids)

        eventually(arrived, within_s=ARRIVES_WITHIN_S, what="an Xid")
        return self.xids.popleft()


# Scenarios: polls, and what is seen after them


@dataclass(frozen=True, slots=True)
class Poll:
    """Lines for the driver, and then some polls."""

    script: tuple[str, ...]
    after_s: float
    times: int


def poll(*script: str, after_s: float = 1.0, times: int = 1) -> Poll:
    return Poll(script, after_s, times)


# Facts by name, `gpu_up`, with labels, `gpu_clock_hertz/sm`, and of another GPU, `gpu_up@1`; also
# `problem`, `processes`, `instances` by UUID, `failures`, whether one is among them, `fails
# gpu_lost`, and how often a function was called, `calls nvmlInit`.
Seen = Mapping[str, object]
Scenarios = Mapping[str, Sequence[Poll | Seen]]


class Known:
    """Equals each value but None."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return other is not None


KNOWN = Known()


def check(nvml: ScriptedNvml, parts: Sequence[Poll | Seen]) -> None:
    """After the polls, what follows is seen."""
    for part in parts:
        if isinstance(part, Poll):
            for _ in range(part.times):
                nvml.poll(*part.script, after_s=part.after_s)
        else:
            seen = {key: _seen(nvml, key) for key in part}
            assert seen == part, seen


def _seen(nvml: ScriptedNvml, key: str) -> object:
    if key == "instances":
        return [instance.uuid for instance in nvml.of().mig_instances]
    if key == "failures":
        return nvml.failures
    if key.startswith("calls "):
        return nvml.driver.calls(key.removeprefix("calls "))
    if key.startswith("fails "):
        return key.removeprefix("fails ") in nvml.failures
    name, _, index = key.partition("@")
    if name in ("problem", "processes"):
        found: object = getattr(nvml.of(int(index or 0)), name)
        return found
    name, *labels = name.split("/")
    return nvml.fact(name, *labels, index=int(index or 0))
