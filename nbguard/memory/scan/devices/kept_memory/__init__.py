"""Memory that torch keeps for its own use, as the scan reads it, such as workspaces of cuBLAS, pinned host memory."""
