"""Holders besides the user's names, such as references of a library, or C++, to the objects that names lead to.

`log = logging.getLogger("zoo")` is the registry's as well: deleting the name frees nothing. The collector's rule tells such
objects: they have more references than all that was walked accounts for. The rest are followed upwards, as those of objects
that no name leads to.
"""

from __future__ import annotations

from nbguard.memory.scan.heap.walk import Walk
from nbguard.memory.scan.outside.outside_references import Region
from nbguard.memory.scan.outside.referrers import name_by_referrers, unnamed_roots
from nbguard.memory.scan.roots.root import LiveRoot

Rooted = tuple[LiveRoot, list[int]]
"""A root, and the numbers of its objects in the walk."""


def other_holders(walk: Walk, roots: list[Rooted]) -> list[Rooted]:
    """Return a root for each holder of an object that names lead to, where the walk has not met it.

    None where part of the heap was left out, as its references cannot be told from others'. Objects that `roots` of running
    code and of registries lead to are in use anyway, so that other holders don't matter.
    """
    if walk.rest is not None:
        return []
    region = Region(walk, named=True)
    held = region.held()
    if not held:
        return []
    in_use = region.points(n for root, entries in roots if root.kind in ("frame", "library") for n in entries)
    named, held = name_by_referrers(region, held, in_use)
    explained = in_use | region.points(n for _, entries in named for n in entries)
    unknown = sorted(region.pointing(held, explained))
    return [*named, *unnamed_roots(walk, unknown)]
