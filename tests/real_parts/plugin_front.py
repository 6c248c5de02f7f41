"""A process that listens as vLLM's front does, and reports by the plugin's own code.

`python -m tests.real_parts.plugin_front PORT` says when it listens. Each line of its input is a
request: `ended ID` reports it, `open` begins one that never ends. It sends again until all is sent.
"""

import socket
import sys
import time

from goodput_agent_vllm.open_requests import OpenRequests
from goodput_agent_vllm.reporting import Reporter
from goodput_agent_vllm.sending import Sender

from tests.plugins.vllm_counts import finished, iteration, scheduler


def main() -> None:
    with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
        sender = Sender(pause_s=0.0)
        reporter = Reporter(sender)
        sys.stdout.write("listens\n")
        sys.stdout.flush()
        for line in sys.stdin:
            kind, _, request_id = line.strip().partition(" ")
            if kind == "ended":
                ended = finished(request_id=request_id)
                reporter.step(scheduler(), iteration(ended, at=time.time()), 0)
            else:
                assert sender.path is not None, "something was reported before"
                front = OpenRequests.beside(sender.path)
                assert front is not None
                front.open(b"", time.time(), time.monotonic())
            while (again_s := sender.flush()) is not None:
                time.sleep(min(again_s, 0.1))


if __name__ == "__main__":
    main()
