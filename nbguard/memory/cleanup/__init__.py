"""Cleanup: `plan` computes the references that go and the bytes that come back; `apply` carries it out and measures."""
