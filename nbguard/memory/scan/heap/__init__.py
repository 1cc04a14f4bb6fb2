"""The walk over Python's heap from every root, with kinds of objects and their references, made compact afterwards."""
