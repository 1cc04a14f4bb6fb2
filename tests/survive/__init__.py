"""Tests of `nbguard.training.survive`."""
