"""Completion of targets, where after `%reset_gpu` and `%gpumem why`, Tab knows every path that a report shows."""

from __future__ import annotations

import re
import sys
from typing import Any

_MAGIC = re.compile(r"\s*%?(?:reset_gpu|gpumem\s+why)\s+(.*)", re.DOTALL)


class PathMatcher:
    """Completes the paths of one shell. It looks at the heap once for each cell, and only if it is asked."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._seen: tuple[int, Any] = (-1, None)  # number of the next cell, graph

    def matcher(self) -> Any:
        """Return the function that IPython's completer calls."""
        try:
            from IPython.core.completer import SimpleCompletion, context_matcher
        except ImportError:  # before IPython 8.6
            return self._matcher_of_words()

        @context_matcher(identifier="nbguard.paths")  # type: ignore[untyped-decorator]
        def nbguard_paths(context: Any) -> Any:
            fragment, paths = self.matches(context.text_until_cursor)
            completions = [SimpleCompletion(text=path, type="path") for path in paths]
            return {"completions": completions, "matched_fragment": fragment, "suppress": bool(paths)}

        return nbguard_paths

    def _matcher_of_words(self) -> Any:
        """Return the function for IPython before 8.6, which replaces the last word of a line, and passes that word alone."""

        def nbguard_paths(word: str) -> list[str]:
            fragment, paths = self.matches(self._shell.Completer.text_until_cursor)
            return [path[len(fragment) - len(word) :] for path in paths]

        return nbguard_paths

    def matches(self, line: str) -> tuple[str, tuple[str, ...]]:
        """Return the end of a line that is the beginning of paths, and these: ("", ()) where there are none."""
        targets = _MAGIC.fullmatch(line)
        if targets is None or "torch" not in sys.modules:
            return "", ()
        try:
            return self._matches(targets[1])
        except Exception:  # noqa: BLE001 - nobody is told at a key stroke
            return "", ()

    def _matches(self, typed: str) -> tuple[str, tuple[str, ...]]:
        from nbguard.memory.core.references.shown_paths import paths_beginning

        graph = self._graph()
        starts = [0, *(blank.end() for blank in re.finditer(r"\s+", typed))]
        for start in dict.fromkeys(starts):
            fragment = typed[start:]
            if (paths := paths_beginning(graph, fragment)) and not fragment.startswith("-"):
                return fragment, paths
        return "", ()

    def _graph(self) -> Any:
        from nbguard.memory.scan.scan import Notebook, scan

        number = self._shell.execution_count
        if self._seen[0] != number:
            self._seen = number, scan(Notebook(shell=self._shell, namespace=self._shell.user_ns)).facts.graph
        return self._seen[1]


def add_completion(shell: Any) -> None:
    """Have Tab complete targets in a shell, once."""
    matchers = getattr(getattr(shell, "Completer", None), "custom_matchers", None)
    if matchers is not None and not any(map(_is_ours, matchers)):
        matchers.append(PathMatcher(shell).matcher())


def remove_completion(shell: Any) -> None:
    """Take the completion of targets out of a shell."""
    matchers: list[Any] = getattr(getattr(shell, "Completer", None), "custom_matchers", [])
    for matcher in [matcher for matcher in matchers if _is_ours(matcher)]:
        matchers.remove(matcher)


def _is_ours(matcher: Any) -> bool:
    return getattr(matcher, "__name__", "") == "nbguard_paths"
