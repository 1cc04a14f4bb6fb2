"""Instruments for memory: counters, categories, growth, recorded allocations."""
