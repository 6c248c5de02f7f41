"""Writes requests into the database of its argument and prints each that was acknowledged."""

import sys
import threading

from agent.store.connection import open_engine
from agent.store.transactions import request_write
from agent.store.writing import RequestWriter
from tests.store.making import WITHIN_S, keys_of, some

SENDERS = 3
BATCH = 7


def _send(writer: RequestWriter, sender: int) -> None:
    number = sender * 1_000_000
    while True:
        new = writer.submit(some(range(number, number + BATCH))).result(WITHIN_S).new
        sys.stdout.write("".join(f"{trace_id} {span_id}\n" for trace_id, span_id in keys_of(new)))
        sys.stdout.flush()
        number += BATCH


def main(url: str) -> None:
    """Never returns."""
    writer = RequestWriter(request_write(open_engine(url)))
    for sender in range(SENDERS):
        threading.Thread(target=_send, args=(writer, sender)).start()


if __name__ == "__main__":
    main(sys.argv[1])
