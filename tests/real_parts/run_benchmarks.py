"""Runs vLLM's own serving benchmark once per argument list in the JSON file named.

The engine's own Python runs this script, once for all runs: importing vLLM takes longer than a run.
The `vllm` command itself wants package metadata that the wheel for CPU lacks.
"""

import gc
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

# One core of its own, as far as the engine leaves it, and before there are threads.
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
# Before everything else that wants this core, where that may be asked for.
with suppress(PermissionError):
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))

from vllm.benchmarks.serve import (  # type: ignore[import-not-found]  # noqa: E402
    add_cli_args,
    main,
)
from vllm.utils.argparse_utils import (  # type: ignore[import-not-found]  # noqa: E402
    FlexibleArgumentParser,
)

if __name__ == "__main__":
    # Walking the heap of a program this large stops it for 300 ms, which its own clock would tell
    # as the server's.
    gc.collect()
    gc.disable()
    for arguments in json.loads(Path(sys.argv[1]).read_text()):
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        main(parser.parse_args(arguments))
