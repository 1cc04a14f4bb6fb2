"""A thread in which tensors without data stand for those of a GPU: autocast, composed operators, kernels' own memory."""
