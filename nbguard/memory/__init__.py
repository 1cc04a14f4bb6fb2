"""The health of memory: facts about a process, who holds what, cleanups, errors that ran out of memory, the allocator."""
