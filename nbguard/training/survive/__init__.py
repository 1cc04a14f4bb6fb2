"""Fits that go on after they ran out of memory: the model's call is divided along the batch, and the weights stay the same."""
