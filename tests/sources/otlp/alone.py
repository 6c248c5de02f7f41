"""A receiver in a process of its own, so that its memory can be told from that of the tests.

It writes the ports of gRPC and HTTP to standard output and ends with standard input.
"""

import asyncio
import gc
import sys
from collections.abc import Sequence

import uvloop

from agent.errors import StoreUnavailable
from agent.records.request import RequestRecord
from tests.sources.otlp.serving import serving

UNSTORABLE = "unstorable"


async def serve() -> None:
    """Serve until nobody is there any more; what is taken is dropped."""
    async with serving(_drop, forward=lambda body: None) as served:
        sys.stdout.write(f"{served.grpc_port} {served.http_port}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


async def _drop(records: Sequence[RequestRecord]) -> int:
    if any(record.request_id == UNSTORABLE for record in records):
        raise StoreUnavailable("not now")
    return 0


if __name__ == "__main__":
    # The agent's collector comes seldom; what waits for it is to be seen.
    gc.disable()
    uvloop.run(serve())
