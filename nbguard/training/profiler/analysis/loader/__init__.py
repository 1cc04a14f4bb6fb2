"""A fit's loaders: the cost of a fetch, the verdict, the advice."""
