"""A thread whose tensors without data stand for a GPU's, with autocast, composed operators, kernels' own memory."""
