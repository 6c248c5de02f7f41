"""NVIDIA's management library as a source: the only folder that knows it.

library   the binding, and what its return codes mean
calls     how one GPU is asked, and which of its calls are off or at rest
fields, getters, gpm, processes, mig   what is asked
field_numbers   what a driver's version changes about it
gpu       all of it for one GPU
events    the thread that waits for Xid errors
session   the GPUs from one initialisation of the library to its shutdown
lifecycle which session there is, and when to try a new one
watch     what the agent polls
"""
