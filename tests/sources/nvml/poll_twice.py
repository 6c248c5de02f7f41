"""Poll in a fresh process, where the binding finds its library by itself; print what was told."""

import json
import logging
import sys

from agent.records.gpu import GpuSample
from agent.sources.nvml.watch import NvmlSinks, NvmlWatch

logging.basicConfig(format="%(message)s")
told: list[GpuSample] = []
failures: list[str] = []
moment = [1000.0]
watch = NvmlWatch(
    sinks=NvmlSinks(told.append, lambda _: None, failures.append),
    monotonic=lambda: moment[0],
    timeout_s=60,
    event_wait_ms=20,
)
for _ in range(2):
    moment[0] += 1
    watch.poll(moment[0])
watch.close()
samples = [
    {"gpu": sample.gpu, "facts": [[*key, value] for key, value in sample.facts.items()]}
    for sample in told
]
sys.stdout.write(json.dumps({"samples": samples, "failures": failures}))
