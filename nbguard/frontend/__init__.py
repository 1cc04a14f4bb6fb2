"""The front end: magics, the sidebar, the command line, engines of a cluster."""
