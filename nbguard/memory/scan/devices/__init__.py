"""Readers of devices and of the host: CUDA, NVML, processes, counters, allocation sites."""
