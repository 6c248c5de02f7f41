"""An agent beside the estimating vLLM, with a model, a price and the stand-in driver's GPU."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.real_engine.watching import ENGINE, Row
from tests.real_parts.agent_process import AgentApi, AgentPorts, HastyAgent
from tests.real_parts.tiny_model import tiny_model
from tests.real_parts.waiting import eventually
from tests.sources.nvml.fake_driver import build

GPU_HOUR_USD = 3.6
TENSOR_ACTIVE, MEMORY_ACTIVE, CLOCK_RATIO = 0.3, 0.4, 0.5
# A minute of this agent has ten seconds; then its rows must come.
COUNTED_WITHIN_S = 240.0

# Numbers of GPM: activity of the tensor cores, of the memory. The clock is at most 1980 MHz.
SCRIPT = (
    f"activity 0 5 {100 * TENSOR_ACTIVE:.0f}",
    f"activity 0 10 {100 * MEMORY_ACTIVE:.0f}",
    f"set 0 sm_clock {1980 * CLOCK_RATIO:.0f}",
)
DRIVER = "driver"


@contextmanager
def watching(
    folder: Path,
    ports: AgentPorts,
    engine_url: str,
    proxy: int,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[AgentApi]:
    """The agent while it runs; on the port `proxy` it passes requests on to the engine.

    `more` has settings of sections that are added to its own. The file `driver` of the folder takes
    lines for the GPU.
    """
    os.mkfifo(folder / DRIVER)
    build(folder)
    # Scripted before the agent reads the GPU, so that no sample is of an idle one.
    environment = {
        "LD_LIBRARY_PATH": str(folder),
        "STANDIN_SCRIPT": "\n".join(SCRIPT),
        "STANDIN_PIPE": str(folder / DRIVER),
    }
    configured = settings(engine_url, proxy)
    for name, section in more.items():
        own = configured.get(name, type(section)())
        configured[name] = own + section if isinstance(section, list) else {**own, **section}
    with HastyAgent.with_settings(folder, ports, configured, environment) as agent:
        yield agent.api


def settings(engine_url: str, proxy: int) -> dict[str, Any]:
    """The agent's settings for the engine."""
    engine = {
        "name": ENGINE,
        "url": engine_url,
        "scrape_interval": "1s",
        "model_config": str(tiny_model()),
        "gpus": [0],
        "parallelism": {"tensor": 1},
        "gpu_hour_usd": GPU_HOUR_USD,
    }
    return {
        "engines": [engine],
        "proxy": {"listen": f"127.0.0.1:{proxy}", "engine": ENGINE, "join_wait": "1s"},
    }


def priced(rows: Iterable[Row]) -> set[str]:
    """The ids of those of these rows that have a price."""
    return {row["request_id"] for row in rows if row["priced_at"]}


def counted(api: AgentApi, ids: set[str]) -> tuple[list[Row], Mapping[str, Any]]:
    """All rows and the summary of the same minutes, once these requests are priced to their end.

    While the row of one is still to come, its minute has more work by the engine than by the rows.
    """

    def read() -> tuple[list[Row], Mapping[str, Any]] | None:
        # A summary is much work for an agent that is still to price these.
        if not ids <= priced(api.requests()):
            return None
        before, rows, after = api.summary(window="1h"), api.requests(), api.summary(window="1h")
        same = before["cost"] == after["cost"] and before["cost"] is not None
        return (rows, after) if same and ids <= priced(rows) else None

    found = eventually(read, within_s=COUNTED_WITHIN_S, what=f"counted minutes of {sorted(ids)}")
    assert found is not None
    return found
