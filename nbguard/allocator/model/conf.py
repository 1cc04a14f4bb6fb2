"""The grammar of a settings string: `key:value,key:[k:v,k:v]`, blanks ignored. What the keys mean is in `settings.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nbguard.errors import SettingsError

Value = str | tuple[tuple[str, str], ...]
"""One word, or the pairs of a list."""

_LONGEST = 4096
_PAIR = re.compile(r"([^:,\[\]]+):(\[[^\[\]]*\]|[^:,\[\]]+)")


def read_conf(conf: str) -> dict[str, Value]:
    """Return keys and values as written; of a key that stands there twice the last counts. Raises SettingsError."""
    text = "".join(conf.split())
    if len(text) > _LONGEST:
        raise SettingsError(f"allocator settings: {len(text)} characters are too many for settings.")
    return {key: _pairs(key, value[1:-1]) if value.startswith("[") else value for key, value in _split(text)}


def _split(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text):
        found = _PAIR.match(text, position)
        end = found.end() if found else position
        if found is None or (end < len(text) and text[end] != ","):
            rest = text[position : position + 40]
            raise SettingsError(f"{rest}: settings are written key:value, with a comma between them.")
        yield found[1], found[2]
        position = end + 1


def _pairs(key: str, text: str) -> tuple[tuple[str, str], ...]:
    pairs = []
    for part in text.split(","):
        name, colon, value = part.partition(":")
        if not (name and colon and value) or ":" in value:
            raise SettingsError(f"{key}: a list is written [256:1,512:2,>:4], and {part!r} is not of that form.")
        pairs.append((name, value))
    return tuple(pairs)


def value_text(value: Value) -> str:
    """Return a value as it is written."""
    return value if isinstance(value, str) else "[" + ",".join(f"{name}:{text}" for name, text in value) + "]"
