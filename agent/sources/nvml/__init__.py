"""NVIDIA's management library (NVML) as a source of GPU samples: the only folder that uses it.

library    the binding, and the meaning of its return codes
calls      the calls of one GPU: which are off, and which rest
fields, getters, gpm, mig   the parts of a sample
nvml_gpu   one GPU: all parts of its sample
xid_events the thread that waits for Xid errors, and their counts
session    the GPUs from one initialisation of the library to its shutdown
lifecycle  replaces a session after a loss
source     the source that the agent polls
"""
