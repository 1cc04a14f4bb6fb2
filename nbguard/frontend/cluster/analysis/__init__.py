"""Answers of engines, as plain data, and the findings on them. Pure."""
