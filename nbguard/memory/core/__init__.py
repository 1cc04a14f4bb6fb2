"""The memory that there is and who holds it: facts, the reference graph, holders, fragmentation. Standard library only."""
