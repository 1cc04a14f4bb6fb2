"""Holders that no root leads to, such as libraries and C++, found by counting references, and uncollected garbage."""
