"""A receiver in a process of its own, so that its memory can be told from that of the tests.

It writes the ports of gRPC and HTTP to standard output and ends with standard input.
"""

import asyncio
import sys

import uvloop

from tests.sources.otlp.serving import serving


async def serve() -> None:
    """Serve until nobody is there any more; what is taken is dropped."""
    async with serving(_drop, forward=lambda body: None) as served:
        print(served.grpc_port, served.http_port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def _drop(records: object) -> None:
    """Take records and keep none."""


if __name__ == "__main__":
    uvloop.run(serve())
