"""The agent whose stages are behind after a second, and whose writer has room for four rows."""

import importlib

from agent.app import own_health
from agent.catalog.own_health import BEHIND_S
from agent.store import writing

vars(own_health)["BEHIND_S"] = dict.fromkeys(BEHIND_S, 1.0)
vars(own_health)["_LATE_S"] = 1.0
vars(own_health)["MAX_WAITING_ROWS"] = writing.MAX_WAITING_ROWS = 4
importlib.import_module("agent.__main__").start()
