"""Readers of devices and of the host, such as CUDA, NVML, processes, counters, allocation sites."""
