"""A simulated GPU, where code that works on CPU tensors runs against a model of the memory of a device."""
