"""Make room by moving tensors out of a device for a moment, so that a request fits that free memory in pieces refused."""
