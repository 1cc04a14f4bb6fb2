"""Code without its secrets, as only strings that are known to be harmless are kept.

A statement that mentions a secret by its name keeps none of its strings. Other strings keep words, paths and versions.
Of a command for the shell, programs that are known keep their arguments. Every step is linear in the source.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from nbguard.libraries import launchers, variable_prefixes

# --- Secrets in texts that are kept, found by the name that a value goes by, by its place in an address, and by its own form


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


# --- source


_TOKEN = re.compile(
    r"(?P<string>[rbfuRBFU]{0,2}(?:\"\"\"|'''|\"|'))|(?P<comment>\#[^\n]*)|(?P<name>[^\W\d]\w*)|(?P<number>\d[\w.]*)"
    r"|(?P<end>\n|;)|(?P<space>(?:[ \t\r\f]|\\\n)+)|(?P<other>.)"
)
_LINE = re.compile(r"[ \t]*(?:[\w.,\[\]'\" ]{1,200}=[ \t]*)?(?P<mark>!!?|%)(?=[\w!./~])")
_CELL = re.compile(r"\s*%%(?P<name>[!\w.]+)(?P<rest>[^\n]*)(?P<body>\n?.*)", re.DOTALL)
_KEY_WORD = re.compile(r"[A-Za-z_. ]{0,24}")

_CALLS = frozenset(
    (
        *("connect", "create_engine", "system", "popen", "Popen", "subprocess", "getoutput", "check_output", "check_call"),
        *("sh", "FTP", "SMTP", "IMAP4", "sshpass", "paramiko", "putrequest", "urlencode"),
    )
)
"""Names whose arguments are often secrets, though no name says so."""

_PYTHON = frozenset(
    (
        *("time", "timeit", "capture", "prun", "memit", "mprun", "lprun", "px", "profile_fit", "python", "python3"),
        *("ignore"),
    )
)
"""Magics that are followed by Python."""
_SHELL = frozenset((*("bash", "sh", "zsh", "!", "script"),))
_MAGICS = frozenset(
    (
        *("load_ext", "reload_ext", "unload_ext", "matplotlib", "autoreload", "cd", "gpumem", "reset_gpu", "nbguard"),
        *("profile_fit", "precision", "pwd", "ls", "run", "pip", "conda", "mamba", "uv", "who", "whos", "reset", "debug"),
        *("tb", "xmode", "pylab", "rehashx"),
    )
)
_PROGRAMS = frozenset(
    (
        *("pip", "pip3", "conda", "mamba", "uv", "apt", "apt-get", "git", "ls", "cd", "mkdir", "cp", "mv", "rm", "pwd"),
        *("cat", "head", "tail", "wc", "unzip", "tar", "nvidia-smi", "python", "python3", "torchrun", *launchers()),
        *("jupyter", "nbdev_export", "which", "df", "du", "free", "nproc", "uname", "sudo"),
    )
)
"""Programs whose arguments are kept, each cleaned. Of any other only its name is."""


@dataclass(slots=True)
class _Token:
    kind: str  # string, comment, name, number, end, space, other or command
    text: str
    is_key: bool = False  # a string that stands in [] behind a name, or before the : of a dict


@dataclass(slots=True)
class _Statement:
    tokens: list[_Token] = field(default_factory=list)

    def names(self) -> Iterator[str]:
        """Yield the names in it, and the strings that are keys."""
        for token in self.tokens:
            if token.kind == "name" and token.text != "pass":
                yield token.text
            elif token.is_key:
                yield _content(token.text)[1]

    def bound_to_string(self) -> str:
        """Return the name that the statement binds to a mere string, or "" if it does something else."""
        significant = [token for token in self.tokens if token.kind not in ("space", "comment", "end")]
        if len(significant) < 3 or significant[0].kind != "name" or significant[1].text != "=":
            return ""
        return significant[0].text if all(token.kind == "string" for token in significant[2:]) else ""


def clean_source(source: str) -> str:
    """Return a cell or a module as it was typed, with `HIDDEN` in place of possible secrets."""
    if cell := _CELL.fullmatch(source):
        return _cell(cell["name"], cell["rest"], cell["body"])
    statements = list(_statements(source))
    secret = [any(_is_telling(name) for name in each.names()) for each in statements]
    used = {name for each, is_secret in zip(statements, secret, strict=True) if is_secret for name in each.names()}
    return "".join(
        _cleaned(each, is_secret=is_secret or each.bound_to_string() in used)
        for each, is_secret in zip(statements, secret, strict=True)
    )


def _is_telling(name: str) -> bool:
    return name in _CALLS or is_secret_name(name)


def _cell(name: str, rest: str, body: str) -> str:
    """Return the cell of a cell magic."""
    head = f"%%{name}{_arguments(rest)}"
    if name in _PYTHON or (name in ("writefile", "file") and rest.rstrip().endswith(".py")):
        return head + clean_source(body)
    if name in _SHELL:
        return head + "\n".join(_command(line) for line in body.split("\n"))
    return f"{head}\n{HIDDEN}" if body.strip() else head


def _statements(source: str) -> Iterator[_Statement]:
    """Yield the logical lines of a source, also of one that is no Python."""
    brackets: list[str] = []
    statement, place, before = _Statement(), 0, ""
    while place < len(source):
        if not statement.tokens and (line := _LINE.match(source, place)):
            end = _end_of_line(source, line.end())
            yield _Statement([_Token("command", source[place:end])])
            place = end
            continue
        match = _TOKEN.match(source, place)
        assert match is not None  # noqa: S101 - `other` takes any character
        assert match.lastgroup is not None  # noqa: S101 - likewise
        token = _Token(match.lastgroup, match[0])
        place = match.end()
        if token.kind == "string":
            place = _end_of_string(source, place, match[0])
            token.text = source[match.start() : place]
            follows = re.compile(r"[ \t\n]{0,80}(.?)").match(source, place)
            token.is_key = bool(brackets) and (brackets[-1], follows[1] if follows else "") in (("subscript", "]"), ("{", ":"))
        elif token.text in ("(", "[", "{"):
            brackets.append("subscript" if token.text == "[" and before in ("name", ")", "]") else token.text)
        elif token.text in (")", "]", "}") and brackets:
            brackets.pop()
        if token.kind not in ("space", "comment"):
            before = token.text if token.kind == "other" else token.kind
        statement.tokens.append(token)
        if token.kind == "end" and not brackets:
            yield statement
            statement = _Statement()
    if statement.tokens:
        yield statement


def _end_of_line(source: str, place: int) -> int:
    """Return the end of a command: of its line, or of the last one that a backslash joins to it."""
    while (end := source.find("\n", place)) >= 0:
        if source[end - 1] != "\\":
            return end
        place = end + 1
    return len(source)


def _end_of_string(source: str, place: int, opening: str) -> int:
    """Return where a string ends; one that is not closed ends with its line, a triple one with the source."""
    quote = opening.lstrip("rbfuRBFU")
    closing = re.compile(rf"(?:\\.|[^\\{'' if len(quote) == 3 else chr(10)}])*?{quote}", re.DOTALL).match(source, place)
    if closing:
        return closing.end()
    end = source.find("\n", place) if len(quote) == 1 else -1
    return len(source) if end < 0 else end


def _content(text: str) -> tuple[str, str, str]:
    """Return opening, content and closing of a string."""
    bare = text.lstrip("rbfuRBFU")
    quote = bare[:3] if bare[:3] in ('"""', "'''") else bare[:1]
    opening = text[: len(text) - len(bare)] + quote
    closing = quote if len(bare) >= 2 * len(quote) and bare.endswith(quote) else ""
    return opening, text[len(opening) : len(text) - len(closing)], closing


def _cleaned(statement: _Statement, *, is_secret: bool) -> str:
    """Return a statement without possible secrets."""
    names = list(statement.names())
    has_variables = any(name in ("environ", "putenv", "setenv", "getenv") for name in names)
    is_recorded = any(name.startswith(RECORDED_VARIABLES) for name in names) and not is_secret
    has_key = any(part in ("key", "keys", "sig", "signature") for name in names for part in name_parts(name))
    kept: list[str] = []
    before = ("", "")  # the two tokens before this one
    for token in statement.tokens:
        match token.kind:
            case "string":
                opening, content, closing = _content(token.text)
                is_asked_for = before[1] == "(" and before[0] in ("getenv", "get", "getpass", "input")
                if (token.is_key or is_asked_for) and re.fullmatch(r"[\w.: -]{0,60}", content):
                    inner = content
                elif content and (is_secret or (has_variables and not is_recorded)):
                    inner = HIDDEN
                else:
                    inner = without_secrets(content, keeps_hashes=False)
                    inner = inner if not has_key or _KEY_WORD.fullmatch(inner) else HIDDEN
                kept.append(f"{opening}{inner}{closing}")
            case "number" if is_secret and sum(map(str.isdigit, token.text)) >= 4:
                kept.append(HIDDEN)
            case "comment":
                kept.append(_comment(token.text))
            case "command":
                kept.append(_line(token.text))
            case _:
                kept.append(token.text)
        if token.kind != "space":
            before = (before[1], token.text)
    return "".join(kept)


def _comment(text: str) -> str:
    """Return a comment up to the name of a secret in it."""
    for match in re.finditer(r"[\w-]+", text):
        if is_secret_name(match[0]) and match.end() < len(text):
            return f"{text[: match.end()]} {HIDDEN}"
    return without_secrets(text, keeps_hashes=False)


def _line(text: str) -> str:
    """Return the line of a magic or of a command for the shell."""
    match = _LINE.match(text)
    assert match is not None  # noqa: S101 - it was found by this expression
    head, rest = text[: match.end()], text[match.end() :]
    if match["mark"] != "%":
        return head + _command(rest)
    name, gap, arguments = re.fullmatch(r"([\w.]*)(\s*)(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
    if name in ("env", "set_env"):
        return f"{head}{name}{gap}{_variable(arguments)}"
    if name in _PYTHON:
        return f"{head}{name}{gap}{clean_source(arguments)}"
    return f"{head}{name}{gap}{_arguments(arguments) if name in _MAGICS else HIDDEN if arguments else ''}"


def _variable(text: str) -> str:
    """Return the setting of an environment variable, with its value if that is on record anyway."""
    match = re.fullmatch(r"(\w+)([ \t]*=[ \t]*|[ \t]+)(.+)", text, re.DOTALL)
    if match is None:
        return text if re.fullmatch(r"\w*", text) else HIDDEN
    is_recorded = match[1].startswith(RECORDED_VARIABLES) and not is_secret_name(match[1])
    return f"{match[1]}{match[2]}{without_secrets(match[3], keeps_hashes=False) if is_recorded else HIDDEN}"


def _command(text: str) -> str:
    """Return a line for the shell: of programs that are not known only the name."""
    kept, is_program, is_hidden = [], True, False
    for word in re.split(r"(\s+|\|\|?|&&?|;|[<>])", text):
        if not word or word.isspace():
            kept.append(word)
        elif word in ("|", "||", "&", "&&", ";"):
            kept.append(word)
            is_program, is_hidden = True, False
        elif is_program:
            program = word.rpartition("/")[2]
            is_program = program == "sudo"
            is_hidden = program not in _PROGRAMS
            kept.append(word if re.fullmatch(r"[\w./-]+", word) else HIDDEN)
        elif is_hidden:
            kept.append(HIDDEN)
        else:
            kept.append(_argument(word))
            is_hidden = is_secret_name(word.partition("=")[0]) or word in ("-p", "-u", "-U:", "-pw")
    return re.sub(rf"{HIDDEN}(?:\s+{HIDDEN})+", HIDDEN, "".join(kept))


def _arguments(text: str) -> str:
    """Return the arguments of a known magic."""
    return _command(f"python {text}")[len("python ") :] if text.strip() else text


def _argument(word: str) -> str:
    name, sign, _ = word.partition("=")
    if sign and "://" not in name and (is_secret_name(name) or name.isupper()):
        return f"{name}={HIDDEN}"
    return without_secrets(word, keeps_hashes=False)
