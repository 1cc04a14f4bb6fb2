"""PyTorch's memory snapshots: safe reading of their files, their schema as frozen data."""
