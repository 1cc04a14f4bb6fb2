"""Why memory is there that no Python object holds: each source of such a row has its words."""

from __future__ import annotations

from typing import get_args

import pytest

from nbguard.memory.core.facts import HolderSource
from nbguard.memory.core.references.explain import explain_unheld, is_explained
from nbguard.memory.core.references.holders import Holder


def row(source: HolderSource) -> Holder:
    return Holder(
        label="a row",
        kind="library",
        retained=8,
        reaches=8,
        cell=None,
        what="1 block",
        stale=False,
        roots=(),
        source=source,
    )


@pytest.mark.parametrize("source", [source for source in get_args(HolderSource) if is_explained(row(source))])
def test_a_row_without_a_root_has_its_keeper(source: HolderSource) -> None:
    why = explain_unheld(row(source))

    (path,) = why.paths
    assert (why.name, why.what, why.nbytes) == ("a row", "1 block", 8)
    assert path.text
    assert path.advice.effect


def test_only_what_a_live_process_has_no_root_for_is_explained() -> None:
    assert {source for source in get_args(HolderSource) if not is_explained(row(source))} == {"python", "pending", "unrecorded"}
