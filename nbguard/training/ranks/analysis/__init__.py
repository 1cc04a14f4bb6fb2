"""Judgement over what the ranks of a job have called: facts in, findings out. Pure."""
