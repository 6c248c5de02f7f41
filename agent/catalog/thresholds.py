"""Thresholds that alerts, dashboards and the analysis share."""

# Waiting requests. A queue that stays longer needs another replica.
DEEP_QUEUE = 10
# Share of the KV cache. A full cache is normal under load; requests that wait for it are not.
FULL_CACHE = 0.95
