"""Notices: what a cell has deleted, bound anew or piled up, and is still in memory."""
