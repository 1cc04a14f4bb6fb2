"""What goes on while the notebook runs: hooks around its cells. Knows IPython; what it says comes from the rooms below."""
