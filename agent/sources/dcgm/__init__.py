"""dcgm-exporter as a source of GPU samples, if NVML shows no GPU.

exporter_gpus  the GPUs of one exposition, in our facts
xid_counts     Xid errors, counted from what each exposition says about them
source         the source that the agent polls
"""
