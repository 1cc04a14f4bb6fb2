"""What keeps memory healthy: facts about a process, who holds what, cleanups, errors that ran out of memory, the allocator."""
