"""Every link of the built site leads somewhere inside of it, and no page fetches anything: check_links.py FOLDER."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_FETCHED = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "srcset"}
"""Elements whose address a browser fetches when it shows the page."""


class Page(HTMLParser):
    """The anchors of a page, the addresses that it links to, and those that it fetches."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element's id and its address."""
        given = {name: value for name, value in attrs if value}
        self.anchors.add(given.get("id", ""))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in _FETCHED and _FETCHED[tag] in given:
            self.fetched.append(given[_FETCHED[tag]])


def mistakes(site: Path) -> list[str]:
    """Return a line for each link that leads nowhere, and for each address that is fetched from elsewhere."""
    pages = {file: Page(file) for file in sorted(site.rglob("*.html"))}
    lines = []
    for file, page in pages.items():
        name = file.relative_to(site)
        lines += [f"{name}: fetches {address}" for address in page.fetched if _is_elsewhere(address)]
        for address in (*page.links, *page.fetched):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                lines.append(f"{name}: no file for {address}")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                lines.append(f"{name}: no place for {address}")
    return lines


def _is_elsewhere(address: str) -> bool:
    parts = urlsplit(address)
    return parts.scheme not in ("", "data") or bool(parts.netloc)


def main() -> int:
    """Print what is wrong with the site in the folder given; return 1 if anything is."""
    site = Path(sys.argv[1]).resolve()
    lines = mistakes(site)
    print(*lines, f"{len(list(site.rglob('*.html')))} pages, {len(lines)} broken links", sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
