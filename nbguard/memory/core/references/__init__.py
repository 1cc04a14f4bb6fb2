"""The graph of references: reach and paths, owner sets, holders, and the explanation of a holder."""
