"""The program that led to a trace (its calls of the allocator), and runs of these calls under other settings."""
