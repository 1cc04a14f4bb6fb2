"""The graph of references, with reach and paths, owner sets, holders, and the explanation of a holder."""
