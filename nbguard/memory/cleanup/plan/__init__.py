"""Cleanup plans, computed from facts alone. Standard library only."""
