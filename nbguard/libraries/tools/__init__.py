"""Libraries that are used with a training to explain, search, sum up, quantize or call in parallel, or for its data."""
