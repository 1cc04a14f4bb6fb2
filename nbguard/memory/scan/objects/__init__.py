"""Readers of single kinds of objects: Learners, loaders and their workers, memory pools, parked tensors."""
