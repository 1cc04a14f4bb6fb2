"""PyTorch's memory snapshots, with safe reading of their files and their schema as frozen data."""
