"""The words of a command's line, as a magic reads them."""

from __future__ import annotations

_CLOSING = {"[": "]", "(": ")", "{": "}"}


def command_words(line: str) -> list[str]:
    """Split a line at blanks outside quotes and brackets, which stay as typed: `runs["my run"] learn` is two words.

    A comment ends it: a word that begins with `#`, outside quotes and brackets.

    IPython's own splitter is the shell's: it would take the quotes of a key away, or split inside it.

    Raises:
        ValueError: a quote or bracket is not closed.
    """
    words, word, expected = [], "", ""
    for char in line:
        if expected and char == expected[-1]:
            expected = expected[:-1]
        elif expected[-1:] in ("'", '"'):
            pass
        elif char in _CLOSING:
            expected += _CLOSING[char]
        elif char in "'\"":
            expected += char
        elif not expected and char == "#" and not word:
            break
        elif not expected and (char.isspace() or char == ","):
            words.append(word)
            word = ""
            continue
        word += char
    if expected:
        raise ValueError(f"{line.strip()}: {expected[-1]} is missing")
    return [text for text in (*words, word) if text]
