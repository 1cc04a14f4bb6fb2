"""The right command for a word or an option that stands behind the wrong magic: `%gpumem doctor` is `%nbguard doctor`."""

from __future__ import annotations

from collections.abc import Sequence

from IPython.core.error import UsageError

from nbguard.notebook.magics.grammar import Grammar

TERMINAL_COMMANDS = frozenset({"completion", "diagnose", "disable", "enable", "gpus", "lock", "profile", "replay", "schema"})
"""Commands of `nbguard` in a terminal that no magic has."""


def right_command(magic: str, texts: Sequence[str]) -> str:
    """Return what a line's word or option goes with, and the command to run; empty where no other magic has it.

    Args:
        magic: the magic that the line has been given to, which cannot read it: `%gpumem`.
        texts: the line's words, the magic's own word first if it has one.
    """
    from nbguard.notebook.magics import gpumem, switch

    grammars = [grammar for grammar in (gpumem.GRAMMAR, switch.GRAMMAR) if grammar.magic != magic]
    word = texts[0] if texts else ""
    for grammar in grammars:
        if word in grammar.words:
            advice = f"run  {grammar.magic} {' '.join(texts)}" if grammar.reads(texts) else grammar.words[word].advice
            return f"{word} is a word of {grammar.magic}: {advice}"
    if word in TERMINAL_COMMANDS:
        return f"{word} is a command of the terminal: run  !nbguard {' '.join(texts)}"
    options = [text.partition("=")[0] for text in texts if text.startswith("--")]
    return next(filter(None, (_of_option(magic, option, texts, grammars) for option in options)), "")


def _of_option(magic: str, option: str, texts: Sequence[str], grammars: Sequence[Grammar]) -> str:
    """Return the same for one option."""
    from nbguard.notebook.magics import reset_gpu

    for grammar in grammars:
        for word in grammar.words_with(option):
            line = [word, *texts] if word else [*texts]
            if grammar.reads(line):
                return f"{option} goes with {grammar.magic}: run  {grammar.magic} {' '.join(line)}"
    if magic != reset_gpu.NAME and option in reset_gpu.OPTIONS:
        advice = f"run  {reset_gpu.NAME} {' '.join(texts)}" if _resets(texts) else f"{reset_gpu.NAME}? shows the options"
        return f"{option} goes with {reset_gpu.NAME}: {advice}"
    return ""


def _resets(texts: Sequence[str]) -> bool:
    from nbguard.notebook.magics.reset_gpu import options_of

    try:
        options_of(texts)
    except UsageError:
        return False
    return True
