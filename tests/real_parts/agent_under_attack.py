"""The agent with few descriptors and short time-outs, for attacks that would take minutes."""

import importlib
import resource
from dataclasses import replace

DESCRIPTORS = 256
resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))

limits = importlib.import_module("agent.app.connection_limits")
vars(limits)["LIMITS"] = {
    setting: replace(usual, head_s=2.0, body_s=2.0, unread_s=4.0)
    for setting, usual in limits.LIMITS.items()
}
importlib.import_module("agent.__main__").start()
