"""Trials of exports collect garbage, over the whole heap, which takes as long as most of the trials."""

from tests.frozen import frozen_in_package  # noqa: F401 - for all tests here
