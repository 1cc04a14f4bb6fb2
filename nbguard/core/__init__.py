"""Pure core: facts in, reports and plans out. Standard library only; no torch, no IPython, no I/O."""
