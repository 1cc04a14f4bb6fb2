"""Channels to the views, that is, comms that may be written from any thread, the panel's own, and the messages sent on them."""
