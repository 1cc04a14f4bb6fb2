"""What looks like a secret is taken out of texts before they are kept: by the names it goes by, and by its own form."""

from __future__ import annotations

import math
import re
from collections import Counter

HIDDEN = "‹hidden›"
"""Stands in the place of what was taken out."""

_WORDS = (
    r"passw(?:or)?d|passwd|passphrase|pwd|secret|token(?!i[sz])|api[_-]?key|apikey|access[_-]?key|private[_-]?key|auth(?:orization)?"
    r"|bearer|credential|client[_-]?id|signature|session[_-]?id|cookie|dsn|webhook|license[_-]?key"
)
_NAMED = re.compile(
    rf"""(?P<name>[\w.\-]*(?:{_WORDS})[\w.\-]*["']?\]?\s*(?::\s*\w+\s*)?(?:=>|:=|==|=|:|,)\s*)"""
    r"""(?P<value>[rbfuRBFU]{0,2}"[^"\n]*"|[rbfuRBFU]{0,2}'[^'\n]*'|[^\s"'(){}\[\],;]+)""",
    re.IGNORECASE,
)
_CALLED = re.compile(
    rf"""(?P<name>(?:login|{_WORDS})\w*\s*\(\s*(?:key\s*=\s*)?)(?P<value>"[^"\n]*"|'[^'\n]*')""", re.IGNORECASE
)
_BEARER = re.compile(r"(?P<name>\b(?:bearer|basic)\s+)(?P<value>[A-Za-z0-9._~+/=\-]{8,})", re.IGNORECASE)
_OPTION = re.compile(rf"(?P<name>--?[\w-]*(?:{_WORDS})[\w-]*[ =])(?P<value>\S+)", re.IGNORECASE)
_SET_ENV = re.compile(rf"(?P<name>%(?:set_)?env\s+\w*(?:{_WORDS})\w*[ \t]+)(?P<value>\S.*)", re.IGNORECASE)
_ADDRESS = re.compile(r"(?P<name>\b[a-z][a-z0-9+.\-]*://)(?P<value>[^\s/@\"']+)(?=@)", re.IGNORECASE)
_FORMS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bhf_[A-Za-z0-9]{16,}|\bpypi-[\w-]{16,}"
    r"|\b(?:sk|pk|rk)[-_](?:live|test|proj|ant)?[-_]?[\w-]{16,}|\bxox[abprs]-[\w-]{10,}|\bAIza[\w-]{30,}|\bya29\.[\w-]{20,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
    re.DOTALL,
)
_LONG = re.compile(r"(?<![\w/.\-])[A-Za-z0-9_\-+]{24,}={0,2}(?![\w/.\-])")
_HEX = re.compile(r"""(?<=["'])[0-9a-fA-F]{32,}(?=["'])""")
_BITS = 3.7
"""Bits of entropy for each character, from which on a long word that mixes cases and digits is a key, not a name."""
_CODE = re.compile(r"(?:True|False|None|str|int|os\.\w.*|getpass.*|self\.\w+|\w+\.\w+.*|\d{1,9}(?:\.\d+)?)")


def without_secrets(text: str) -> str:
    """Return a text in which each value that looks like a secret is replaced by `HIDDEN`."""
    text = _FORMS.sub(HIDDEN, text)
    text = _ADDRESS.sub(rf"\g<name>{HIDDEN}", text)
    text = _BEARER.sub(rf"\g<name>{HIDDEN}", text)
    text = _CALLED.sub(rf"\g<name>'{HIDDEN}'", text)
    text = _SET_ENV.sub(rf"\g<name>{HIDDEN}", text)
    text = _NAMED.sub(_hide, text)
    text = _OPTION.sub(rf"\g<name>{HIDDEN}", text)
    text = _HEX.sub(HIDDEN, text)
    return _LONG.sub(lambda match: HIDDEN if _is_key(match[0]) else match[0], text)


def is_secret_name(name: str) -> bool:
    """Return whether a variable of this name may hold a secret."""
    return re.search(_WORDS, name, re.IGNORECASE) is not None or name.upper().endswith(("_KEY", "_PAT"))


def _hide(match: re.Match[str]) -> str:
    """Return an assignment without its value, unless that is code which reads it from elsewhere."""
    value = match["value"]
    quote = value.lstrip("rbfuRBFU")[:1]
    if quote in ("'", '"'):
        inner = value.lstrip("rbfuRBFU")[1:-1]
        return match[0] if not inner else f"{match['name']}{quote}{HIDDEN}{quote}"
    return match[0] if _CODE.fullmatch(value) else f"{match['name']}{HIDDEN}"


def _is_key(word: str) -> bool:
    """Return whether a long word is as random as a key: no name that people make is."""
    kinds = [any(map(test, word)) for test in (str.isupper, str.islower, str.isdigit)]
    counts = Counter(word)
    entropy = -sum(count / len(word) * math.log2(count / len(word)) for count in counts.values())
    return all(kinds) and entropy > _BITS
