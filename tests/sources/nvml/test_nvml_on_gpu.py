"""The script for machines with GPUs, run whole against the scripted driver."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.nvml_on_gpu import main
from tests.sources.nvml.fake_driver import gpu_uuid

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]

# Says what the scripted driver's GPUs are like, in nvidia-smi's own form.
NVIDIA_SMI = """#!{python}
import sys
VALUES = {values!r}
UUIDS = {uuids!r}
assert "--format=csv,noheader,nounits" in sys.argv
((table, asked),) = [word.split("=") for word in sys.argv if word.startswith("--query-")]
queries = asked.split(",")
if table == "--query-compute-apps":
    raise SystemExit(0)
for index, uuid in enumerate(UUIDS):
    row = dict(VALUES, uuid=uuid, gpu_uuid=uuid, index=str(index))
    print(", ".join(row.get(query, "[N/A]") for query in queries))
"""
REASONS = (
    "sw_power_cap",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
)
TRUE_VALUES = {
    "name": "NVIDIA H200",
    "driver_version": "580.65.06",
    "memory.total": "143771",
    "memory.reserved": "614",
    "memory.used": "0",
    "memory.free": "143157",
    "power.draw": "78.12",
    "enforced.power.limit": "700.00",
    "temperature.gpu": "32",
    "temperature.memory": "36",
    "clocks.sm": "345",
    "clocks.mem": "3201",
    "clocks.max.sm": "1980",
    "clocks.max.mem": "3201",
    "utilization.gpu": "0",
    "utilization.memory": "0",
    "ecc.errors.corrected.volatile.total": "0",
    "ecc.errors.uncorrected.volatile.total": "0",
    "mig.mode.current": "Disabled",
    "power.draw.instant": "78.00",
    "clocks_event_reasons.gpu_idle": "Active",
    **{
        f"clocks_event_reasons.{reason}": "Not Active"
        for reason in (*REASONS, "applications_clocks_setting", "hw_slowdown")
    },
    **{f"clocks_event_reasons_counters.{reason}": "0" for reason in REASONS},
    "ecc.mode.current": "Enabled",
    "ecc.errors.corrected.aggregate.total": "0",
    "ecc.errors.uncorrected.aggregate.total": "0",
    "remapped_rows.correctable": "0",
    "remapped_rows.uncorrectable": "0",
    "remapped_rows.pending": "No",
    "remapped_rows.failure": "No",
}


UUIDS = [gpu_uuid(0), gpu_uuid(1)]


def _run(folder: Path, library: Path, values: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    smi = folder / "nvidia-smi"
    smi.write_text(NVIDIA_SMI.format(python=sys.executable, values=values, uuids=UUIDS))
    smi.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(library.parent),
        "STANDIN_GPUS": "2",
    }
    wanted = ("--seconds", "0.6", "--interval", "0.2", "--output", str(folder / "out.json"))
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.nvml_on_gpu", *wanted],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_only_what_nvidia_smi_sees_otherwise_is_named_and_what_was_read_is_kept(
    tmp_path: Path, library: Path
) -> None:
    others = {
        "memory.total": "81559",
        "clocks.max.sm": "1755",
        "temperature.memory": "[N/A]",
        "utilization.gpu": "9",
        "power.draw": "90",
        "remapped_rows.uncorrectable": "1",
        # As where the driver has other numbers for its fields.
        "clocks_event_reasons_counters.hw_thermal_slowdown": "4000000",
    }
    done = _run(tmp_path, library, {**TRUE_VALUES, **others})
    assert done.returncode == 1
    for query, shown in others.items():
        assert re.search(
            rf"{re.escape(query)}: agent \S+, nvidia-smi {re.escape(shown)}", done.stdout
        )
    assert done.stdout.count(", nvidia-smi ") == len(UUIDS) * len(others)
    kept = json.loads((tmp_path / "out.json").read_text())
    assert kept["date"].startswith("20")
    assert [sample["gpu"] for sample in kept["samples"]] == UUIDS
    assert kept["samples"][0]["facts"]["gpu_tensor_active_ratio"] == 0
    assert kept["call_s"]["nvmlDeviceGetFieldValues"]["calls"] == 2 * (1 + len(kept["poll_s"]))
    assert not kept["failures"]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_time_in_which_nothing_is_read_is_refused(seconds: str) -> None:
    with pytest.raises(SystemExit):
        main(["--seconds", seconds])
