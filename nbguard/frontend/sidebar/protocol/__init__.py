"""The messages between a kernel and its sidebars, as `docs/protocol.md` writes them down. Standard library only."""
