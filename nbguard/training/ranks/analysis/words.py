"""Sentences about ranks and their calls."""

from __future__ import annotations

from collections.abc import Collection

from nbguard.render.words import numbered
from nbguard.training.ranks.analysis.facts import CollectiveCall, RankFacts
from nbguard.units import format_time


def ranks_words(ranks: Collection[int]) -> str:
    """Return ranks in words: "rank 1", "ranks 0 and 2", "ranks 1, 2 and 3"."""
    return numbered("rank", ranks)


def have(ranks: Collection[int]) -> str:
    """Return the verb that goes with so many ranks."""
    return "has" if len(ranks) == 1 else "have"


def are(ranks: Collection[int]) -> str:
    """Return the verb that goes with so many ranks."""
    return "is" if len(ranks) == 1 else "are"


def wait(ranks: Collection[int]) -> str:
    """Return the verb that goes with so many ranks."""
    return "waits" if len(ranks) == 1 else "wait"


def call_words(call: CollectiveCall) -> str:
    """Return a call in words: "`all_reduce` of 4 × float32"."""
    words = f"`{call.name}`"
    if call.elements is not None:
        words += f" of {call.elements} × {call.dtype or '?'}"
    if call.detail:
        words += f" ({call.detail})"
    return words


def place_words(call: CollectiveCall) -> str:
    """Return the line of a call in words: " at `train.py:13`"; empty where it is not known."""
    by = f" in {call.caller}" if call.caller else ""
    return f"{by} at `{call.place}`" if call.place else by


def call_at(call: CollectiveCall) -> str:
    """Return a call and its line in words: "`all_reduce` of 4 × float32 at `train.py:13`"."""
    return call_words(call) + place_words(call)


def stands_words(facts: RankFacts) -> str:
    """Return where a rank stands, in words."""
    if not facts.stands:
        return "its position is not known"
    function = f" (in `{facts.function}`)" if facts.function else ""
    since = f" for {format_time(round(facts.since * 1e9))}" if facts.since >= 1 else ""
    return f"it has been at `{facts.stands}`{function}{since}" if since else f"it is at `{facts.stands}`{function}"
