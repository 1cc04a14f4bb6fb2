"""Readers of out-of-memory errors, of their texts, the exceptions around them, the moment of the failure."""
