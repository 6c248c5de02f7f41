"""dcgm-exporter as a source of GPU samples, if NVML shows no GPU."""
