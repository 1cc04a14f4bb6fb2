"""The switch of notices, lines after cells that leave deleted, rebound or piled-up objects in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbguard.memory.cleanup.apply.released_names import listeners

if TYPE_CHECKING:
    from nbguard.memory.cells.hooks import Hooks
    from nbguard.memory.cells.notices import NoticeWatch
    from nbguard.memory.core.analysis import Analysis
    from nbguard.memory.core.references.explain import Why
    from nbguard.memory.reports.notices.notice import Notice, Notices


class NoticeSwitch:
    """Notices of one session, on or off.

    Args:
        shell: of the session.
        hooks: of the session.
        show: shows a notice.
    """

    def __init__(self, shell: Any, hooks: Hooks, show: Callable[[Notice], None]) -> None:
        self._shell = shell
        self._hooks = hooks
        self._show = show
        self._watch: NoticeWatch | None = None

    @property
    def is_on(self) -> bool:
        """Say whether notices are made."""
        return self._watch is not None and self._watch in self._hooks.listeners

    @property
    def notices(self) -> Notices:
        """Return the notices so far; they stay when notices are switched off."""
        from nbguard.memory.reports.notices.notice import Notices

        return Notices(notices=(), on=False) if self._watch is None else self._watch.made(on=self.is_on)

    def current(self, analysis: Analysis) -> tuple[Notice, ...]:
        """Return the notices that hold by a scan made now, for sidebars."""
        return () if self._watch is None else self._watch.current(analysis)

    def why(self, name: str) -> Why | None:
        """Return the remains of the object that a deleted name was bound to, or None if it is unknown."""
        return None if self._watch is None or not self.is_on else self._watch.why(name)

    def turn_on(self) -> None:
        """Make notices from now on, about all names."""
        if self._watch is None:
            from nbguard.memory.cells.notices import NoticeWatch

            self._watch = NoticeWatch(self._shell, self._show, lambda: self._hooks.source, self._hooks.counters)
        self._watch.speak()
        if not self.is_on:
            self._hooks.add(self._watch)
            listeners.append(self._watch.release)

    def turn_off(self) -> None:
        """Make no notices."""
        if self._watch is not None:
            self._hooks.remove(self._watch)
            listeners[:] = [listener for listener in listeners if listener != self._watch.release]
            self._watch.forget_names()

    def be_quiet(self, *names: str) -> None:
        """Show no notices about these names; without any, none at all."""
        if self._watch is not None:
            self._watch.be_quiet(*names)

    def expect_cleanup(self) -> None:
        """Make no notice of the leftovers of a cleanup in the current cell, as it tells them itself."""
        if self._watch is not None:
            self._watch.expect_cleanup()
