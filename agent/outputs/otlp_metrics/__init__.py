"""The agent's own metrics, pushed over OTLP."""
