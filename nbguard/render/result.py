"""The base of every public result, which shows itself where a cell ends with it, as text, HTML and JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbguard.render.html import Block
    from nbguard.texts import Host

SCHEMA = 1
"""The number of the schemas of all results in JSON."""


class Result:
    """A frozen dataclass with a view: a function that returns its blocks. `print` shows it; `repr` and equality are its own.

    Back ends and views are imported when a result is first shown: whoever only computes one does not wait for them.
    """

    __slots__ = ()

    kind: ClassVar[str]
    """The name of the result in JSON. Readers depend on it: it stays when the class is renamed."""
    view: ClassVar[str]
    """`module:function` of the view. A view imports its result's class, so the class can only name it."""
    data: ClassVar[str] = ""
    """`module:function` that returns the fields of the JSON, where these are not the fields of the class."""
    label: ClassVar[str] = "GPU memory report"
    """The name of the region in HTML, for readers who cannot see it."""

    def __str__(self) -> str:
        """Return the result as the text that a notebook shows; where there are no magics, with calls for commands."""
        return self.shown()["text/plain"]

    def blocks(self, **options: int | None) -> Iterable[Block]:
        """Return the blocks of the view; `limit=12`: rows of a report, a history or a map."""
        from pkgutil import resolve_name

        shown: Iterable[Block] = resolve_name(self.view)(self, **options)
        return shown

    def mimebundle(self, **options: int | None) -> dict[str, str]:
        """Return the result as {'text/plain': ..., 'text/html': ...}; `options` as in `blocks`."""
        return _bundle(self.blocks(**options), self.label, "notebook")

    def shown(self) -> dict[str, str]:
        """Return the same as the host at hand shows it: where there are no magics, with calls of Python for commands."""
        from nbguard.texts import here

        return _bundle(self.blocks(), self.label, here())

    def json_bundle(self) -> dict[str, Any]:
        """Return the result as {'text/plain': JSON text, 'application/json': data}."""
        from nbguard.plain_data import to_json

        data = self.to_data()
        return {"text/plain": to_json(data), "application/json": data}

    def to_data(self) -> dict[str, Any]:
        """Return the result as JSON-ready data; sizes in bytes."""
        from pkgutil import resolve_name

        from nbguard.plain_data import to_plain

        fields: dict[str, Any] = resolve_name(self.data)(self) if self.data else to_plain(self)
        return {"schema": SCHEMA, "kind": self.kind, **fields}

    def display_metadata(self) -> dict[str, Any]:
        """Return the data that a notebook keeps with the displayed result, in the metadata of the output."""
        return {}

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> Any:  # noqa: ARG002 - IPython's names
        """Return the mimebundle that IPython shows where a cell ends with the result; with its metadata, if any."""
        bundle, metadata = self.shown(), self.display_metadata()
        return (bundle, metadata) if metadata else bundle


def _bundle(blocks: Iterable[Block], label: str, where: Host) -> dict[str, str]:
    from nbguard.render.html import blocks_html
    from nbguard.render.text import blocks_text

    shown = tuple(blocks)
    return {"text/plain": blocks_text(shown, where), "text/html": str(blocks_html(shown, label, where))}
