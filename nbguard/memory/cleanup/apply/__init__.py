"""The effects of a plan, one step at a time, and the bytes that they gave back."""
