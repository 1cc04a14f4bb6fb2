"""The operation that made a value that is not finite, recorded, computed again, described."""
