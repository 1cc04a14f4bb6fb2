"""The door for assistants: a server of the Model Context Protocol over files, and over kernels whose person has consented."""
