"""What serves the sidebars of one kernel: who looks, what is told how often, what is asked for and when it is done."""
