"""The allocator's segments, with pools, fragmentation, pinning blocks, and the largest request that would succeed."""
