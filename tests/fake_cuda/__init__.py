"""PyTorch's real CUDA build on a device that is not there: see README.md."""
