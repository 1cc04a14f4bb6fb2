"""What a person meets: magics, the sidebar, the command line, engines of a cluster."""
