"""A model of PyTorch's caching allocator, exact event by event, and replays of recorded runs on it. Pure Python."""
