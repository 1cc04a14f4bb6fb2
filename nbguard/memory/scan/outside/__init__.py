"""Holders that no root leads to: libraries and C++, found by counting references, and garbage that waits for the collector."""
