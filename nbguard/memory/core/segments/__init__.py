"""The allocator's segments: pools, fragmentation, pinning blocks, and the largest request that would succeed."""
