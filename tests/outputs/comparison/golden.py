"""Comparisons as text, kept in files beside this one. Run as a module, it writes them anew."""

from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path

import numpy as np
from rich.console import Console

from agent.analysis.comparison.comparing import Comparison, compare
from agent.analysis.comparison.run_columns import MinuteColumns, RunColumns
from agent.outputs.comparison import markdown, print_comparison
from tests.analysis.comparison.queue_runs import QueuedRun

FOLDER = Path(__file__).parent
WIDTHS = (80, 200)


def _run(name: str, seed: int, servers: int) -> RunColumns:
    """A run with all that a database knows; fewer servers use their GPUs less."""
    run = QueuedRun(seed=seed, servers=servers, length_s=1200.0, rate=1.0, mean_s=3.0).run()
    random, used = np.random.default_rng(seed), servers / 8
    varying = {
        column: value * random.normal(1, 0.05, 20)
        for column, value in (("flops", 40.0 * used), ("moved_bytes", 60.0 * used))
    }
    constant = {
        column: np.full(20, value)
        for column, value in (
            *(("possible_flops", 100.0), ("possible_bytes", 100.0), ("bill_usd", 0.05)),
            *(("output_tokens", 1920.0), ("good_tokens", 1500.0)),
        )
    }
    at_s = np.arange(20) * run.length_s / 20
    return replace(
        run,
        name=name,
        minutes=MinuteColumns(at_s=at_s, **varying, **constant),
        events={},
        causes={"sequence_cap": round(run.requests * (1 - used)), "burst": 12},
    )


@cache
def worse() -> Comparison:
    """Half as many servers."""
    return compare(_run("2026-11-20T10:00/20m", 1, 8), _run("2026-11-21T10:00/20m", 2, 4))


@cache
def other_load() -> Comparison:
    """More requests."""
    after = QueuedRun(seed=2, rate=6.0).run()
    return compare(QueuedRun(seed=1).run(), replace(after, name="more | requests"))


def terminal(comparison: Comparison, width: int) -> str:
    """What is printed on a terminal of this width."""
    console = Console(file=StringIO(), width=width, highlight=False)
    print_comparison(comparison, console)
    file = console.file
    assert isinstance(file, StringIO)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def texts() -> dict[str, str]:
    """All texts by the names of their files."""
    return {
        **{f"worse-{width}.txt": terminal(worse(), width) for width in WIDTHS},
        "worse.md": markdown(worse()),
        "other-load.md": markdown(other_load()),
    }


if __name__ == "__main__":
    for name, text in texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
