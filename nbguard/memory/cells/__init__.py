"""Hooks around the user's cells and the ledger of each cell's memory."""
