"""One mimebundle per result: text for a terminal, HTML for a notebook."""

from __future__ import annotations

from typing import Any

from nbguard.core.plan import Outcome, Plan
from nbguard.core.report import Report
from nbguard.core.why import Why
from nbguard.render.html import outcome_html, plan_html, report_html, why_html
from nbguard.render.payload import payload, to_json
from nbguard.render.text import outcome_text, plan_text, report_text, why_text


def mimebundle(result: Report | Plan | Outcome | Why, limit: int = 12) -> dict[str, Any]:
    """Return `result` as {'text/plain': ..., 'text/html': ...}."""
    match result:
        case Report():
            return {"text/plain": report_text(result, limit), "text/html": report_html(result, limit)}
        case Plan():
            return {"text/plain": plan_text(result), "text/html": plan_html(result)}
        case Outcome():
            return {"text/plain": outcome_text(result), "text/html": outcome_html(result)}
        case Why():
            return {"text/plain": why_text(result), "text/html": why_html(result)}


def json_bundle(result: Report | Plan | Outcome | Why) -> dict[str, Any]:
    """Return `result` as {'text/plain': JSON text, 'application/json': data}."""
    return {"text/plain": to_json(result), "application/json": payload(result)}
