"""Make room by moving: the search on states of the allocator, and random programs on the fake device."""
