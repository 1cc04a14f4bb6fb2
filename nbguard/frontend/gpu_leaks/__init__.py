"""`pytest --gpu-leaks`: a test that leaves memory of tensors behind fails, with the holder of each piece. On CPUs, too."""
