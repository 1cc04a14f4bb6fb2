"""The line of memory over time for hours in bounded memory, and the marks of cells, epochs and failed requests."""
