"""Text as it may be printed. Names of files, their contents and variables of the environment are not trusted."""

from __future__ import annotations


def printable(text: str, kept: str = "") -> str:
    """Return text with a blank for each character that is not printed, as those that steer a terminal or the reading direction.

    Args:
        text: any text.
        kept: characters that stay although they are not printed, such as the end of a line.
    """
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() or character in kept else " " for character in text)
