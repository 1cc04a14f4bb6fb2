"""Probes: look at the process and return facts. One outside library per file, imported lazily.

A probe changes nothing: it creates no CUDA context, does not synchronize, collect or empty a cache, and runs no code of the
user's. It goes by `type(obj)`, never `isinstance`, and never calls repr, str, ==, len or bool on a user's object.
"""
