"""Memory snapshots: capturing, saving, loading, comparing them, and what-ifs of their traces."""
