"""Receives OTLP exports of spans over gRPC and HTTP."""
