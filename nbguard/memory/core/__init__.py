"""The memory and its holders, as facts, the reference graph, holders, fragmentation. Standard library only."""
