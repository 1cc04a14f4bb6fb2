"""Secrets in texts that are kept, found by the name that a value goes by, by its place in an address, and by its own form."""

from __future__ import annotations

import itertools
import re

from nbguard.libraries import variable_prefixes

HIDDEN = "‹hidden›"
"""Stands in the place of a value that was taken out."""

RECORDED_VARIABLES = (
    *("CUDA_", "CUDNN_", "CUBLAS_", "NCCL_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "KMP_", "GLOO_", "HIP_", "ROCR_"),
    *("XLA_", "NVIDIA_TF32_OVERRIDE", "PYTHONHASHSEED", *variable_prefixes(), "TRITON_", "TORCHINDUCTOR_"),
)
"""Beginnings of the names of environment variables whose values are kept. No other variable is read."""

_PARTS = frozenset(
    (
        *("pw", "pwd", "pass", "passwd", "password", "passwords", "passphrase", "passcode", "secret", "secrets", "token"),
        *("tokens", "credential", "credentials", "creds", "cred", "auth", "oauth", "authorization", "authenticate"),
        *("bearer", "apikey", "cookie", "cookies", "dsn", "webhook", "webhooks", "login", "signin", "fernet", "otp"),
    )
)
"""Parts of a name that make it the name of a secret."""

_WITHIN = ("password", "passwd", "passphrase", "secret", "credential", "apikey", "accesskey", "privatekey", "webhook")
"""The same, also within a part: `dbpassword`."""

_KEYS = frozenset(
    (
        *("api", "access", "private", "secret", "license", "account", "encryption", "signing", "master", "ssh", "deploy"),
        *("service", "storage", "client", "shared", "session"),
    )
)
_IN_TEXT_MODELS = frozenset(
    (
        *("bos", "eos", "pad", "unk", "sep", "cls", "mask", "special", "max", "min", "num", "n", "len", "length", "count"),
        *("ids", "type", "per", "new", "next", "start", "end", "image", "vocab", "position", "embedding", "embeddings"),
        *("embed", "text", "word", "sub", "sot", "eot", "drop", "batch", "seq", "sequence", "input", "output"),
        *("generated", "prompt", "total", "class", "classification", "level"),
    )
)
"""Beside `token` in the names that language models use: `max_new_tokens`, `pad_token`."""

_HUMP = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_PIECE = re.compile(r"[A-Za-z0-9]{12,}")
_UUID = re.compile(r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}")
_WORD = re.compile(r"[A-Za-z0-9+/=_~.%@$!&*^-]{12,}")
_URL = re.compile(r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]{0,30}://)([^\s\"'<>`]*)")
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----")
_END_OF_KEY = re.compile(r"-----END [A-Z ]{0,40}PRIVATE KEY-----")
_BEARER = re.compile(r"\b(bearer|basic)([ \t]{1,8})([A-Za-z0-9._~+/=-]{6,})", re.IGNORECASE)
_OPTION = re.compile(r"(?<![\w-])(--?)([A-Za-z][\w-]{0,60})([ \t]{1,8}|=)(\S+)")
_NAMED = re.compile(r"(?<![\w.-])([\w.-]{1,80})([\"']?\]?[ \t]{0,8}(?:=>|:=|==|=|:|,)[ \t]{0,8})([^\n]*)")
_FORMS = re.compile(
    r"\b(?:gh[pousr]_|github_pat_|gl(?:pat|rt|ft|oat|imt)-|npm_|sq0[a-z]{3}-|hf_|pypi-|sk-|sk_|pk_|rk_|xox[abeprs]-|AIza|ya29\.|eyJ|dapi|SG\.|AKIA|ASIA)"
    r"[\w.-]{6,}"
)
_CODE = re.compile(r"(?:True|False|None|str|int|os\.\w.*|getpass.*|self\.\w+|\w+\.\w+.*|\d{1,3}(?:\.\d+)?)")


def is_secret_name(name: str) -> bool:
    """Return whether a variable of this name may hold a secret."""
    if name.isupper() and name.endswith(("KEY", "_PAT", "_SIG")):
        return True
    parts = name_parts(name)
    telling = _PARTS.intersection(parts)
    if telling:
        return not telling <= {"token", "tokens"} or _IN_TEXT_MODELS.isdisjoint(parts)
    for before, part in itertools.pairwise(("", *parts)):
        if (before in _KEYS and part in ("key", "keys")) or (before in ("client", "session") and part == "id"):
            return True
        if any(inner in part for inner in _WITHIN) or ("token" in part and "tokeni" not in part):
            return True
    return False


def name_parts(name: str) -> list[str]:
    """Return the words of a name in lower case: `HTTPBasicAuth` is http, basic and auth."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def without_secrets(text: str, *, keeps_hashes: bool = True) -> str:
    """Return a text with `HIDDEN` for each value that looks like a secret.

    Args:
        text: a value, a comment or the content of a string, not code: see `nbguard/training/runs/analysis/source.py`.
        keeps_hashes: whether hexadecimal numbers stay, such as commits and nbguard's own hashes.
    """
    text = _without_private_keys(text)
    text = _URL.sub(lambda match: match[1] + _address(match[2], keeps_hashes=keeps_hashes), text)
    text = _BEARER.sub(lambda match: f"{match[1]}{match[2]}{HIDDEN}", text)
    text = _OPTION.sub(lambda match: f"{match[1]}{match[2]}{match[3]}{HIDDEN}" if is_secret_name(match[2]) else match[0], text)
    text = "\n".join(_named(line) for line in text.split("\n"))
    text = _FORMS.sub(HIDDEN, text)
    return _WORD.sub(lambda match: HIDDEN if is_random(match[0], keeps_hashes=keeps_hashes) else match[0], text)


def is_random(word: str, *, keeps_hashes: bool = False) -> bool:
    """Return whether a word is as random as a key: no name, path or version that people write is."""
    if keeps_hashes and re.fullmatch(r"[0-9a-f.-]+", word):
        return False
    if _UUID.search(word):
        return True
    if any(map(_is_random_piece, _PIECE.findall(word))):
        return True
    joined = re.sub(r"[/+=]", "", word)  # base64
    safe = re.sub(r"[_-]", "", word)  # base64 for addresses
    return (len(joined) >= 30 and joined.isalnum() and _hump_length(joined) < 3.2) or (
        len(safe) >= 30 and safe.isalnum() and _hump_length(safe) < 2.2
    )


def _is_random_piece(piece: str) -> bool:
    """Return whether letters and digits alternate more than in words: the humps of `CamelCase2024` are Camel, Case and 2024."""
    if piece.isdigit():
        return len(piece) >= 15
    inner = sum(hump.isdigit() for hump in _HUMP.findall(piece)[:-1])
    if inner > 1 or (inner and len(piece) >= 24):
        return True
    return _hump_length(piece) < (3.2 if len(piece) >= 20 else 2.6) and (inner > 0 or len(piece) >= 16)


def _hump_length(piece: str) -> float:
    humps = _HUMP.findall(piece)
    return sum(map(len, humps)) / len(humps) if humps else 0.0


def _without_private_keys(text: str) -> str:
    """Return a text without the private keys in it, each up to its end or that of the text."""
    kept, place = [], 0
    while begin := _PRIVATE_KEY.search(text, place):
        kept += [text[place : begin.start()], HIDDEN]
        end = _END_OF_KEY.search(text, begin.end())
        place = end.end() if end else len(text)
    return "".join([*kept, text[place:]])


def _address(rest: str, *, keeps_hashes: bool) -> str:
    """Return the rest of an address after its scheme: host and path stay; user, query and random-looking parts do not."""
    authority, slash, path = rest.partition("/")
    authority, mark, query = authority.partition("?")
    if "@" in authority:
        authority = f"{HIDDEN}@{authority.rpartition('@')[2]}"
    path, path_mark, path_query = path.partition("?")
    parts = name_parts(authority) + name_parts(path)
    if "webhook" in parts or "webhooks" in parts or "hooks" in parts:
        path = HIDDEN if path else ""
    path = _WORD.sub(lambda match: HIDDEN if is_random(match[0], keeps_hashes=keeps_hashes) else match[0], path)
    return f"{authority}{mark}{HIDDEN if query else ''}{slash}{path}{path_mark}{HIDDEN if path_query else ''}"


def _named(line: str) -> str:
    """Return a line with each value behind the name of a secret hidden, up to the next `;`, `,` or `&`."""
    kept, place = [], 0
    while match := _NAMED.search(line, place):
        if not is_secret_name(match[1]):
            kept.append(line[place : match.start(3)])
            place = match.start(3)
            continue
        value, ending = _value(match[3])
        kept += [line[place : match.start(3)], value]
        place = match.start(3) + ending
    return "".join([*kept, line[place:]])


def _value(text: str) -> tuple[str, int]:
    """Return the stand-in for the value at the beginning of a text, and how long that value is."""
    quote = text[:1] if text[:1] in ("'", '"') else ""
    end = text.find(quote, 1) if quote else next((place for place, sign in enumerate(text) if sign in ";,&(){}[]"), len(text))
    if quote:
        inner = text[1 : end if end > 0 else len(text)]
        return (f"{quote}{HIDDEN if inner else ''}{quote}", end + 1) if end > 0 else (f"{quote}{HIDDEN}", len(text))
    bare = text[:end].strip()
    return (text[:end], end) if not bare or bare == HIDDEN or _CODE.fullmatch(bare) else (HIDDEN, end)
