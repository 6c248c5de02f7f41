"""The trace span of each measured exchange, made with the OpenTelemetry SDK."""
