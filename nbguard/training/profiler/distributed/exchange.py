"""Messages of ranks to rank 0 at their end, through the store of the process group, and on one host through their files, too.

Never a collective: a rank that hangs in one takes nobody else with it. The store is spoken to in a thread of its own, since
it answers no more once its host is gone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from nbguard.training.ranks.job_board import JobBoard

_EVERY = 0.05  # seconds between two looks into the store


class RankExchange:
    """Carries texts from ranks to rank 0, for one fit. All ranks number their fits alike."""

    def __init__(self, board: JobBoard | None, fit: int) -> None:
        self._board = board
        self._fit = fit
        self._inbox: dict[int, str] = {}
        self._is_over = threading.Event()

    def send(self, rank: int, text: str, limit: float, *, is_read_here: bool) -> None:
        """Leave the text of a rank in the store, for up to `limit` seconds, and if rank 0 reads it there in the rank's file."""
        if self._board is not None and is_read_here:
            self._board.own.write("message", f"{self._fit} {text}")
        _aside(lambda: self._put(rank, text)).join(limit)

    def listen(self, ranks: Collection[int]) -> None:
        """Begin to look for messages of these ranks in the store."""
        _aside(lambda: self._look(set(ranks)))

    def read(self, ranks: Collection[int]) -> dict[int, str]:
        """Return the messages of these ranks so far."""
        texts = {rank: self._inbox[rank] for rank in ranks if rank in self._inbox}
        for rank in ranks:
            if rank not in texts and (text := self._from_file(rank)) is not None:
                texts[rank] = text
        return texts

    def close(self) -> None:
        """Stop looking."""
        self._is_over.set()

    def _from_file(self, rank: int) -> str | None:
        """Return the message that a rank of this host left for this fit."""
        file = None if self._board is None else self._board.file(rank)
        fit, _, text = ((file and file.read("message")) or "").partition(" ")
        return text if fit == str(self._fit) else None

    def _put(self, rank: int, text: str) -> None:
        store = self._store()
        if store is not None:
            store.set(str(rank), text)

    def _look(self, missing: set[int]) -> None:
        store = self._store()
        while store is not None and missing and not self._is_over.is_set():
            for rank in list(missing):
                if store.check([str(rank)]):
                    self._inbox[rank] = store.get(str(rank)).decode()
                    store.delete_key(str(rank))
                    missing.discard(rank)
            self._is_over.wait(_EVERY)

    def _store(self) -> Any:
        """Return the store of the process group, for this fit's keys only; None without a group."""
        torch: Any = sys.modules.get("torch")
        if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return None
        from torch.distributed import PrefixStore, distributed_c10d

        return PrefixStore(f"nbguard/{self._fit}", distributed_c10d._get_default_store())


def _aside(act: Callable[[], None]) -> threading.Thread:
    """Start a thread that does something and says nothing if it fails: then there is the folder, or a rank not heard of."""

    def quietly() -> None:
        with suppress(Exception):
            act()

    thread = threading.Thread(target=quietly, name="nbguard-ranks", daemon=True)
    thread.start()
    return thread
