"""Memory that torch keeps for its own use, as the scan reads it: workspaces of cuBLAS, pinned host memory."""
