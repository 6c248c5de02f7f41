"""Exporters, dcgm-exporter and that of AMD, as a source of GPU samples, if NVML shows no GPU."""
