"""Cleanup: `plan` computes which references go and how many bytes come back; `apply` does it and measures."""
