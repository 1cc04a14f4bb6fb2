"""The card after an out-of-memory error and its ranked fixes. Standard library only."""
