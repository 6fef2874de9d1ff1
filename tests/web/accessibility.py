"""Accessibility checks, evaluated in the browser itself: names, headings, contrast, focus."""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

_CONTROLS = {"button", "textbox", "combobox", "radio", "checkbox", "link", "dialog", "img", "region", "radiogroup"}

_CONTRASTS = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
  const behind = (element) => {
    if (!element) return [255, 255, 255, 1];
    const own = rgba(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own : over(own, behind(element.parentElement));
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((v) => v / 255)
      .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [dark, bright] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (bright + 0.05) / (dark + 0.05);
  };
  const texts = [...document.querySelectorAll("body *")].filter((e) => e.checkVisibility({opacityProperty: true}) &&
    ([...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) || e.placeholder));
  return texts.map((e) => {
    const style = getComputedStyle(e, e.placeholder && !e.value ? "::placeholder" : null);
    const ground = behind(e);
    return [(e.placeholder || e.textContent).trim().slice(0, 40), ratio(over(rgba(style.color), ground), ground)];
  });
}"""

_DUPLICATES = """() => {
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  const missing = [...document.querySelectorAll("[for],[aria-labelledby],[aria-controls]")].flatMap((e) =>
    ["for", "aria-labelledby", "aria-controls"].map((n) => e.getAttribute(n)).filter((id) => id && !ids.includes(id)));
  return [...ids.filter((id, i) => ids.indexOf(id) !== i), ...missing];
}"""

_HEADINGS = """() => [...document.querySelectorAll("h1,h2,h3,h4,h5,h6")].filter((e) => e.checkVisibility())
  .map((e) => Number(e.tagName[1]))"""

# A choice's label can be pressed too.
_SMALL = """() => [...document.querySelectorAll("button, select, textarea, summary, input")]
  .filter((e) => e.checkVisibility())
  .map((e) => [e.ariaLabel || e.id || e.textContent || e.value, (e.closest("label") ?? e).getBoundingClientRect()])
  .filter(([, box]) => box.height < 24 || box.width < 24).map(([name, box]) => [name, box.width, box.height])"""

_FOCUS = """() => {
  const e = document.activeElement, s = getComputedStyle(e), next = e.nextElementSibling;
  const ring = (style) => style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
  const seen = ring(s) || (next && ring(getComputedStyle(next))) || e.matches("#prompt");
  return e === document.body ? null : [e.id || e.ariaLabel || e.textContent.trim().slice(0, 40), Boolean(seen)];
}"""


def nameless_controls(page: "Page") -> list[dict[str, Any]]:
    """As the browser computes names for a screen reader."""
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    shown = [node for node in nodes if not node["ignored"] and node["role"]["value"] in _CONTROLS]
    assert len(shown) > 15
    return [node for node in shown if not node.get("name", {}).get("value", "").strip()]


def low_contrasts(page: "Page") -> list[Any]:
    """Texts and placeholders below 4.5 to 1, those of controls that are switched off too."""
    contrasts: list[Any] = page.evaluate(_CONTRASTS)
    assert len(contrasts) > 15
    return [(text, round(ratio, 2)) for text, ratio in contrasts if ratio < 4.5]


def check_structure(page: "Page") -> None:
    duplicates = page.evaluate(_DUPLICATES)
    assert duplicates == [], duplicates
    headings: list[int] = page.evaluate(_HEADINGS)
    assert headings.count(1) == 1
    assert all(deeper - level <= 1 for level, deeper in pairwise(headings)), headings
    small = page.evaluate(_SMALL)
    assert small == [], small
    assert page.locator("[tabindex]:not([tabindex='0']):not([tabindex='-1'])").count() == 0
    assert page.locator("main").count() == 1
    assert page.evaluate("document.documentElement.lang") == "en"


def tab_order(page: "Page", count: int) -> list[str]:
    """Where the tabulator goes; each place must show that it has the focus."""
    names = []
    for _ in range(count):
        page.keyboard.press("Tab")
        focus = page.evaluate(_FOCUS)
        if focus is not None:
            assert focus[1], f"the focus on {focus[0]!r} cannot be seen"
            names.append(focus[0])
    return names
