"""What-ifs of a file or of the running kernel, all devices together: text, HTML and plain data."""

from __future__ import annotations

from html import escape
from typing import Any

from nbguard.allocator.replay.advice import notes, recommendation, requests_name
from nbguard.allocator.replay.whatif import WhatIf
from nbguard.render.elements import columns, head_line, listed, page, table_row
from nbguard.snapshots.render_replay import self_check, whatif_json, whatif_text
from nbguard.snapshots.whatif import WhatIfs
from nbguard.units import format_bytes

_HEADINGS = ("settings", "peak reserved", "out of memory", "retries", "driver calls")
_FIGURES = (1, 2, 3, 4)


def whatifs_text(found: WhatIfs) -> str:
    """Return each device's self-check, table and recommendation."""
    text = "\n\n".join(whatif_text(found.name, each) for each in found.devices)
    return "\n".join([text, *(f"  • {line.replace('`', '')}" for line in found.to_free)])


def whatifs_html(found: WhatIfs) -> str:
    """Return the same as HTML."""
    return page("".join(_device(found.name, each) for each in found.devices) + listed(found.to_free))


def whatifs_json(found: WhatIfs) -> dict[str, Any]:
    """Return the same as plain data, as `python -m nbguard whatif --json` has it for a device; bytes as integers."""
    devices = [whatif_json(found.name, each) for each in found.devices]
    return {"name": found.name, "devices": devices, "to_free": list(found.to_free)}


def _device(name: str, found: WhatIf) -> str:
    data = whatif_json(name, found)
    capacity = f" of {format_bytes(found.capacity)}" if found.capacity is not None else ""
    top = head_line(f"cuda:{data['device']}", name, f"{requests_name(found)}{capacity}")
    if not data["events"]:
        return top + f"<div>{escape(self_check(found.replay))}: there is nothing to run again</div>"
    body = "".join(_setting(each) for each in data["rows"])
    said = f'<div class="dim">{escape(self_check(found.replay))}</div>{columns(_HEADINGS, _FIGURES, body)}'
    return f"{top}{said}<div><b>{escape(recommendation(found))}</b></div>{listed(notes(found))}"


def _setting(each: dict[str, Any]) -> str:
    refused, peak = each["out_of_memory"], format_bytes(each["peak_reserved"])
    if each["peak_reserved_least"] != each["peak_reserved"]:
        peak = f"{format_bytes(each['peak_reserved_least'])} – {peak}"
    where = "no" if refused is None else f"request {refused['request']} ({format_bytes(refused['size'])})"
    name = f"<code>{escape(each['settings'] or 'defaults')}</code>" + (" (as recorded)" if each["recorded"] else "")
    return table_row(name, peak, where, str(each["retries"]), str(each["driver_calls"]), numbers=_FIGURES)
