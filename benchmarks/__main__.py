"""`python -m benchmarks [NAME ...]`: run all benchmarks or some; exits 1 if a target is missed."""

import multiprocessing
import sys

from benchmarks import (
    acknowledgement,
    cause_queries,
    causes,
    clickhouse,
    compare,
    compare_study,
    demo_causes,
    expiry,
    first_figures,
    fleet,
    ingest,
    long_mix,
    long_run,
    middleware,
    middleware_cost,
    minutes,
    nvml,
    page,
    plugin,
    postgres_rows,
    proxy,
    proxy_long_run,
    proxy_measuring,
    proxy_times,
    publishing,
    report,
    rollups,
    scrape,
    stops,
)

BENCHMARKS = {
    "ingest": ingest.run,
    "acknowledgement": acknowledgement.run,
    "publishing": publishing.run,
    "expiry": expiry.run,
    "fleet": fleet.run,
    "first_figures": first_figures.run,
    "rollups": rollups.run,
    "minutes": minutes.run,
    "report": report.run,
    "page": page.run,
    "demo": page.run_demo,
    "scrape": scrape.run,
    "nvml": nvml.run,
    "causes": causes.run,
    "demo_causes": demo_causes.run,
    "compare": compare.run,
    "compare_study": compare_study.run,
    "cause_queries": cause_queries.run,
    "clickhouse": clickhouse.run,
    "postgres_rows": postgres_rows.run,
    "plugin": plugin.run,
    "middleware": middleware.run,
    "middleware_cost": middleware_cost.run,
    "stops": stops.run,
    "proxy_measuring": proxy_measuring.run,
    "proxy": proxy.run,
    "proxy_times": proxy_times.run,
    "proxy_long_run": proxy_long_run.run,
    "long_mix": long_mix.run,
    "long_run": long_run.run,
}


def main(names: list[str]) -> int:
    """Run the benchmarks; return the exit code, 0 if every target is met."""
    # A new process for each, so that none inherits another's heap or processor.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        met = [pool.apply(BENCHMARKS[name]) for name in names or BENCHMARKS]
    return 0 if all(met) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
