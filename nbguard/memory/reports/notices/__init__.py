"""Notices on objects that a cell deleted, bound again or piled up, and that are still in memory."""
