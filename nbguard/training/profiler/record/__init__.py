"""The record of a running fit, with its log of phases and the patches that write it."""
