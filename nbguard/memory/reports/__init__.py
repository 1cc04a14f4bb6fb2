"""The report, its findings, the memory map and the cells' ledger. Standard library only."""
