"""A model of PyTorch's caching allocator, exact event by event, and what it can say about a recorded run. Pure Python."""
