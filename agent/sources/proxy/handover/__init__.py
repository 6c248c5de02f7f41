"""Hands records of the proxy's workers to the agent over a local socket."""
