"""A trial of determinism: one step is run several times from one state, on copies, and its bits are compared."""
