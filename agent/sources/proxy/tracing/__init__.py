"""The trace span of each measured exchange, by the OpenTelemetry SDK."""
