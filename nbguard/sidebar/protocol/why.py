"""What keeps a holder alive, as a sidebar shows it."""

from __future__ import annotations

from nbguard.memory.explain import Why
from nbguard.sidebar.protocol.state import WhyView
from nbguard.sidebar.protocol.truncation import cut

_PATHS = 40


def why_view(why: Why) -> WhyView:
    """Return the answer of `%gpumem why` as it goes over the wire."""
    paths = tuple((cut(path.text), path.cell, path.stale, cut(path.release)) for path in why.paths[:_PATHS])
    more = tuple((cut(root), count) for root, count in why.more[:_PATHS])
    return WhyView(name=cut(why.name), what=cut(why.what), nbytes=why.nbytes, paths=paths, more=more)
