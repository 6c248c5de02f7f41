"""`python -m benchmarks.proxy_agent PORT ENGINE_URL [MODULE:FACTORY]`: the agent's proxy alone.

The factory, called without arguments, gives the measuring; without one nothing is measured.
"""

import asyncio
import importlib
import sys
import time
from typing import Any

import uvloop

from agent.sources.listening import open_socket
from agent.sources.proxy.choosing import EngineFacts, ProxiedEngine
from agent.sources.proxy.parts import Clocks
from agent.sources.proxy.proxy import Proxy, ProxySinks
from agent.sources.proxy.server import proxy_server
from benchmarks.garbage import collect_like_the_agent


def _measuring(factory: str) -> Any:
    module, _, name = factory.partition(":")
    return getattr(importlib.import_module(module), name)()


def _failed(reason: str) -> None:
    print(f"the proxy failed at {reason}", file=sys.stderr)


async def _serve(port: int, engine_url: str, *factory: str) -> None:
    proxy = Proxy(
        [ProxiedEngine("chat-0", engine_url)],
        EngineFacts(serves=lambda _: None, healthy=lambda _: True),
        measuring=_measuring(factory[0]) if factory else None,
        clocks=Clocks(time.time, time.monotonic),
        sinks=ProxySinks(_failed),
    )
    proxy_server(proxy, open_socket("proxy", "127.0.0.1", port)).start()
    collect_like_the_agent()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), sys.argv[2], *sys.argv[3:]))
