"""Code without its secrets, as only strings that are known to be harmless are kept.

A statement that mentions a secret by its name keeps none of its strings. Other strings keep words, paths and versions.
Of a command for the shell, programs that are known keep their arguments. Every step is linear in the source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from nbguard.libraries import launchers
from nbguard.training.runs.analysis.secrets import HIDDEN, RECORDED_VARIABLES, is_secret_name, name_parts, without_secrets

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
