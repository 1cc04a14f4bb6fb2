"""Renderers of reports and outcomes as text, HTML and JSON. Strings only; nothing is printed here."""
