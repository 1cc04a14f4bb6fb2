"""The IPython session, with magics, listeners around cells, switches. With `sidebar` the only room that knows IPython."""
