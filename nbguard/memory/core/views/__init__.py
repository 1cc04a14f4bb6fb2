"""Results about memory as blocks of text and figures."""
