"""Ranks that hang, disagree or die, told by rank, collective and line. Runs in every rank; speaks to none of them."""
