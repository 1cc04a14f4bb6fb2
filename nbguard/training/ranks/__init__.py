"""Ranks that hang, disagree or die: which rank, which collective, which line. Runs in every rank; speaks to none of them."""
