"""Diagnosis of frozen facts, each check with its evidence, each finding with the one command that acts. Pure."""
