"""The agent with few descriptors, short time-outs and little room, for attacks that would take
minutes and gigabytes."""

import importlib
import resource
from dataclasses import replace

DESCRIPTORS = 256
ROOM_BYTES = 2 * 1024 * 1024
resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))

limits = importlib.import_module("agent.app.listeners")
vars(limits)["LIMITS"] = {
    setting: replace(usual, head_s=2.0, body_s=2.0, unread_s=4.0, requests_bytes=ROOM_BYTES)
    for setting, usual in limits.LIMITS.items()
}
limits.LIMITS[limits.PROXY] = replace(limits.LIMITS[limits.PROXY], unread_bytes=ROOM_BYTES)
importlib.import_module("agent.__main__").start()
