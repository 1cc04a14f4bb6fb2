"""Trials of export on copies of the model, with every failure by module, line and fix, and values compared."""
