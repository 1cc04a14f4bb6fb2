"""What a run was made of: its record, collected without changing a bit, and what differs between two."""
