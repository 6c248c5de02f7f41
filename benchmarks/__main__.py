"""`python -m benchmarks [NAME ...]`: run all or some, and fail where a target is missed."""

import multiprocessing
import sys

from benchmarks import ingest, long_run, nvml, proxy, proxy_measuring, rollups, scrape

BENCHMARKS = {
    "ingest": ingest.run,
    "rollups": rollups.run,
    "scrape": scrape.run,
    "nvml": nvml.run,
    "proxy_measuring": proxy_measuring.run,
    "proxy": proxy.run,
    "long_run": long_run.run,
}


def main(names: list[str]) -> int:
    """The exit code: 0 where every target holds."""
    # Each in a process of its own, so that none inherits another's heap or processor.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        held = [pool.apply(BENCHMARKS[name]) for name in names or BENCHMARKS]
    return 0 if all(held) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
