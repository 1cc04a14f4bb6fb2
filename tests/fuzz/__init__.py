"""Files and texts as a stranger would make them: damaged, hostile, and each fault that was found so, by its name.

A file is a seed. `make fuzz` tries many; by hand: NBGUARD_FUZZ=300 pytest tests/fuzz; NBGUARD_FUZZ_FROM=300: from that one on.
"""
