"""Read-only readers of the running process, joined into `Facts`. One outside library per file, imported lazily."""
