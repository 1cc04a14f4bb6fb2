"""The line of memory over time: readings of hours in bounded memory, and the marks of cells, epochs and failed requests."""
