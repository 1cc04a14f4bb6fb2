"""The door for assistants, a server of the Model Context Protocol for files and for kernels whose person consents."""
