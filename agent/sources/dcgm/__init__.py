"""A page of dcgm-exporter as a source of GPU samples, where NVML shows no GPU.

rows      what a row of the page is about: a GPU, or a MIG instance of one
readings  the GPUs of one page, in our facts
xids      Xid errors, counted from what the pages say of them
watch     what the agent polls
"""
