"""The hub of one kernel, which serves all its sidebars."""
