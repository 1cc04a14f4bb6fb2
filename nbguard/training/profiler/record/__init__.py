"""The record of a running fit: its log of phases and the patches that write it."""
