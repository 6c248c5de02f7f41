"""Runs vLLM's own serving benchmark for each plan named in a pipe: one path a line.

A plan is a JSON list of argument lists. When all its runs are over, a file with the suffix `.done`
lies beside it. The engine's own Python runs this script, once for all plans: importing vLLM takes
longer than a run. The `vllm` command itself wants package metadata that the wheel for CPU lacks.
"""

import gc
import json
import os
import sys
from pathlib import Path

from vllm.benchmarks.serve import (  # type: ignore[import-not-found]
    add_cli_args,
    main,
)
from vllm.utils.argparse_utils import (  # type: ignore[import-not-found]
    FlexibleArgumentParser,
)


def run(plan: Path) -> None:
    """Run every argument list of a plan, one after the other."""
    for arguments in json.loads(plan.read_text()):
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        main(parser.parse_args(arguments))
    plan.with_suffix(".done").touch()


if __name__ == "__main__":
    # Walking the heap of a program this large stops it for 300 ms, and the benchmark would count
    # them as the server's.
    gc.collect()
    gc.disable()
    # Opened for writing too, so that the pipe never ends.
    with os.fdopen(os.open(sys.argv[-1], os.O_RDWR)) as plans:
        while line := plans.readline():
            run(Path(line.strip()))
