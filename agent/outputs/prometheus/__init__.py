"""The agent's own metrics for Prometheus."""
