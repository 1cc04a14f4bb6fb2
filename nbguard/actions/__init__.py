"""Effects: carry out a plan, one step at a time, and measure what came back. Nothing else in nbguard changes the process."""
