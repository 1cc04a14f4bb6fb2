"""Whether this process is one of several ranks as its launcher meant it, or can launch some."""
