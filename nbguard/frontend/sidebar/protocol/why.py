"""The paths that keep a holder alive, as a sidebar shows them."""

from __future__ import annotations

from nbguard.frontend.sidebar.protocol.state import KeptPath, MorePaths, WhyView
from nbguard.frontend.sidebar.protocol.truncation import truncate_utf8
from nbguard.memory.core.references.explain import Why

_PATHS = 40


def why_view(why: Why) -> WhyView:
    """Return the answer of `%gpumem why` as it goes over the wire."""
    paths = tuple(
        KeptPath(
            truncate_utf8(path.text),
            path.cell,
            path.stale,
            truncate_utf8(path.advice.command),
            truncate_utf8(path.advice.effect),
        )
        for path in why.paths[:_PATHS]
    )
    more = tuple(MorePaths(truncate_utf8(root), count) for root, count in why.more[:_PATHS])
    return WhyView(name=truncate_utf8(why.name), what=truncate_utf8(why.what), nbytes=why.nbytes, paths=paths, more=more)
