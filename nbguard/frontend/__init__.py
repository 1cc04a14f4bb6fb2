"""The front end, with magics, the sidebar, the command line, engines of a cluster."""
