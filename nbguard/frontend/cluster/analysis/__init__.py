"""What engines have answered, as plain data, and what stands out among them. Pure."""
