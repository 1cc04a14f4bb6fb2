"""What the sidebar shows and may ask for. Pure: facts in, plain data out, as docs/protocol.md writes it down."""
