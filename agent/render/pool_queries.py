"""PromQL of pools of prefill and decode engines; each caller selects the series."""

from agent.render.promql import by

OF_POOL = ("model", "role")
_OF_ENGINE = ("instance", "engine", "model")


def by_pool(series: str, roles: str, how: str = "sum") -> str:
    """Series of engines by model and role; engines that do both phases are in no pool.

    `roles` are series of `llm_engine_role`.
    """
    return _of_pools(by(_OF_ENGINE, series), roles, how)


def queue_by_pool(for_capacity: str, waiting: str, roles: str, window: str) -> str:
    """The requests that wait in each engine of a pool, as a mean over the window.

    Those that wait for KV values in a decode engine do not lack an engine. Of engines that give no
    reasons, all that wait count.
    """
    known = " or ".join(
        by(_OF_ENGINE, f"avg_over_time({series}[{window}])") for series in (for_capacity, waiting)
    )
    return _of_pools(f"({known})", roles, "avg")


def _of_pools(of_engines: str, roles: str, how: str) -> str:
    role = by(("instance", "engine", "role"), roles, "max")
    return by(OF_POOL, f"{of_engines} * on (instance, engine) group_left (role) {role}", how)
