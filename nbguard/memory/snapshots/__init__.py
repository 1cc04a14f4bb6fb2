"""Memory snapshots, for capturing, saving, loading, comparing them, and what-ifs of their traces."""
