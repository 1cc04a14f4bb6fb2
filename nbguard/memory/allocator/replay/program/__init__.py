"""The program that led to a trace: the calls that it made to the allocator, and runs of these calls under other settings."""
