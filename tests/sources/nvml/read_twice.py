"""Read in a fresh process, where the binding finds its library by itself; print the result."""

import json
import logging
import sys

from agent.sources.nvml.source import NvmlSource

logging.basicConfig(format="%(message)s")
moment = [1000.0]
source = NvmlSource(monotonic=lambda: moment[0], timeout_s=60, event_wait_ms=20)
samples: list[dict[str, object]] = []
failures: list[str] = []
for _ in range(2):
    moment[0] += 1
    read = source.read(moment[0])
    failures += read.failures
    samples += [
        {"gpu": sample.gpu, "facts": [[*key, value] for key, value in sample.facts.items()]}
        for sample in read.samples
    ]
source.close()
sys.stdout.write(json.dumps({"samples": samples, "failures": failures}))
