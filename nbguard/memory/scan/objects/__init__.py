"""Readers of single kinds of objects, such as Learners, loaders and their workers, memory pools, parked tensors."""
