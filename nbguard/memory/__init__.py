"""The health of memory: facts about a process, holders, cleanups, errors that ran out of memory, the allocator."""
