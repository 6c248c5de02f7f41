"""NVIDIA's management library (NVML) as a source of GPU samples: the only folder that uses it.

library       the binding, its return codes, and the calls of one GPU: which are off, and which rest
sample_parts  the parts of a sample
nvml_gpu      one GPU, with its MIG instances: all parts of its sample
xid_events    the thread that waits for Xid errors, and their counts
source        the source that the agent polls; its sessions with the library
"""
