"""Fast path for unsolicited messages such as ticks, in Jupyter's format: their common parts are made once.

`Session.send` packs four dicts for each message and asks two dozen traits. A tick goes out four times a second, next to a fit
that has evicted all of that from the processor's caches: there it takes as long as all else in a tick.
"""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from itertools import count
from typing import Any

from nbguard.plain_data import fields_of

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, default=fields_of)
_NOTHING = b"{}"
_JSON = ("json", "orjson")
"""Names of Jupyter's packers that write JSON."""


class UnaskedSender:
    """Sends messages of one type on the kernel's IOPub channel, in the name of no request."""

    def __init__(self, kernel: Any, msg_type: str, topic: bytes) -> None:
        self._kernel = kernel
        self._session = session = kernel.session
        self._topic = topic
        self._pid = os.getpid()
        self._count = count()
        header = session.msg_header(msg_type)
        known = {name: value for name, value in header.items() if name not in ("msg_id", "date")}
        self._id = f"{header['msg_id']}_"
        self._header = _ENCODER.encode(known).removesuffix("}")
        self._can = session.packer in _JSON and not (session.adapt_version or session.metadata or session.debug)

    def send(self, content: dict[str, Any]) -> bool:
        """Send a message. False, and nothing is sent: it or the session is one that `Session.send` alone knows how to treat."""
        if not self._can or os.getpid() != self._pid:
            return False
        try:
            packed = _ENCODER.encode(content).encode()
        except (TypeError, ValueError):  # something that only Jupyter packs, not a number, half a character
            return False
        date = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
        header = f'{self._header}, "msg_id": "{self._id}{next(self._count)}", "date": "{date}"}}'
        parts = [header.encode(), _NOTHING, _NOTHING, packed]
        self._session.send_raw(self._kernel.iopub_socket, parts, ident=self._topic)
        return True
