"""Records of runs as frozen data, how they are shown, and which of two records' differences can change bits. Pure."""
