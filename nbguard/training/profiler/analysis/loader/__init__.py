"""A fit's loaders, with the cost of a fetch, the verdict, the advice."""
