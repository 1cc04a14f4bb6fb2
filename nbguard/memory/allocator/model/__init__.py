"""PyTorch's caching allocator, modelled event by event."""
