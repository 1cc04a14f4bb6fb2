"""Readers of out-of-memory errors: their texts, the exceptions around them, the moment of the failure."""
