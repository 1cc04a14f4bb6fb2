"""The contrast of what is drawn in the view against the ground it is on."""

from __future__ import annotations

from playwright.sync_api import Page

_GRAPHICS = ".nbguard-bar i, .nbguard-key i, .nbguard-strips i, .nbguard-dot, .nbguard-progress i, .nbguard-chart-path"

_RATIOS = """selectors => {
  const parse = text => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return text.startsWith('color(srgb') ? [r * 255, g * 255, b * 255, a] : [r, g, b, a];
  };
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255).map(c => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const view = document.querySelector('.nbguard-view');
  const ground = light(parse(getComputedStyle(view).backgroundColor));
  const found = [];
  for (const node of view.querySelectorAll(selectors)) {
    const style = getComputedStyle(node);
    const colour = parse(node instanceof SVGElement ? style.stroke : style.backgroundColor);
    if (colour[3] === 0 || !node.checkVisibility()) continue;
    const own = light(colour);
    const ratio = (Math.max(own, ground) + 0.05) / (Math.min(own, ground) + 0.05);
    found.push([node.className.baseVal ?? node.className, ratio, style.backgroundImage !== 'none']);
  }
  return found;
}"""

_LEAST = 3
"""To one: WCAG 1.4.11, for parts of a picture."""


def graphics(page: Page) -> list[tuple[str, float, bool]]:
    """Return each part of the view's pictures that is seen: its class, its contrast to one, and whether it has a pattern."""
    return [tuple(each) for each in page.evaluate(_RATIOS, _GRAPHICS)]


def faint(drawn: list[tuple[str, float, bool]]) -> list[tuple[str, float]]:
    """Return those that do not stand out from the ground."""
    return [(name, round(ratio, 2)) for name, ratio, _ in drawn if ratio < _LEAST]
