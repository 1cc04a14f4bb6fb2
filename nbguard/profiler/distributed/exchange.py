"""Messages of ranks to rank 0 at their end: through the store of the process group, and on one host through a folder, too.

Never a collective: a rank that hangs in one takes nobody else with it. The store is spoken to in a thread of its own, since
it answers no more once its host is gone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

_EVERY = 0.05  # seconds between two looks into the store


class RankExchange:
    """Carries texts from ranks to rank 0, for one fit. All ranks number their fits alike."""

    def __init__(self, folder: Path | None, fit: int) -> None:
        self._folder = folder
        self._fit = fit
        self._inbox: dict[int, str] = {}
        self._is_over = threading.Event()

    def send(self, rank: int, text: str, limit: float, *, is_read_here: bool) -> None:
        """Leave the text of a rank in the store, for up to `limit` seconds, and if rank 0 reads it there in the folder."""
        if self._folder is not None and is_read_here:
            path = self._path(self._folder, rank)
            with suppress(OSError):
                path.with_suffix(".new").write_text(text, encoding="utf-8")
                path.with_suffix(".new").replace(path)
        _aside(lambda: self._put(rank, text)).join(limit)

    def listen(self, ranks: Collection[int]) -> None:
        """Begin to look for messages of these ranks in the store."""
        _aside(lambda: self._look(set(ranks)))

    def read(self, ranks: Collection[int]) -> dict[int, str]:
        """Return the messages of these ranks so far."""
        texts = {rank: self._inbox[rank] for rank in ranks if rank in self._inbox}
        for rank in ranks:
            if self._folder is not None and rank not in texts:
                with suppress(OSError):
                    texts[rank] = self._path(self._folder, rank).read_text(encoding="utf-8")
        return texts

    def close(self, ranks: Collection[int]) -> None:
        """Stop looking, and take the messages of these ranks out of the folder."""
        self._is_over.set()
        if self._folder is not None:
            for rank in ranks:
                self._path(self._folder, rank).unlink(missing_ok=True)

    def _path(self, folder: Path, rank: int) -> Path:
        return folder / f"{rank}-{self._fit}.json"

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
