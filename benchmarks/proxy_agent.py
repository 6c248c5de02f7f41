"""`python -m benchmarks.proxy_agent PORT ENGINE_URL [measured]`: the agent's proxy alone.

Without `measured` it only relays. Records are dropped; span ids are made, and no span is exported.
"""

import asyncio
import sys
import time

import uvloop

from agent.app.listeners import PROXY, ConnectionLimits, raise_descriptors
from agent.sources.listening import open_socket
from agent.sources.proxy.load_balancer import EngineLookup, ProxiedEngine
from agent.sources.proxy.measuring.measured_exchange import RequestMeasuring
from agent.sources.proxy.relay_context import Clocks, ProxyLimits
from agent.sources.proxy.request_spans import ProxyTracing
from agent.sources.proxy.reverse_proxy import ProxyServer, ReverseProxy
from benchmarks.garbage import collect_like_the_agent


def _measuring() -> RequestMeasuring:
    tracing = ProxyTracing(None, service="benchmark", keep=lambda _: False)
    return RequestMeasuring("benchmark", tracing, lambda _: None, _failed)


def _failed(reason: str) -> None:
    print(f"the proxy failed at {reason}", file=sys.stderr)


async def _serve(port: int, engine_url: str, *, measured: bool) -> None:
    proxy = ReverseProxy(
        [ProxiedEngine("chat-0", engine_url)],
        EngineLookup(models=lambda _: None, healthy=lambda _: True),
        measuring=_measuring() if measured else None,
        clocks=Clocks(time.time, time.monotonic),
        limits=ProxyLimits(connect_s=5.0),
        on_failure=_failed,
    )
    limits = ConnectionLimits(raise_descriptors(), lambda *_: None)
    listening = open_socket(PROXY, "127.0.0.1", port, limits.backlog(PROXY))
    ProxyServer(proxy, listening, limits.clients(PROXY)).start()
    collect_like_the_agent()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), sys.argv[2], measured="measured" in sys.argv[3:]))
