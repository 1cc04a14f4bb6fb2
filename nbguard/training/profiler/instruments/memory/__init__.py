"""Instruments for memory, such as counters, categories, growth, recorded allocations."""
