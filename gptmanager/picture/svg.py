"""SVG as text: elements, numbers, and the style sheet of all pictures.

The colors are from the palette of Okabe and Ito, which readers with any color vision can
distinguish, or are variants with more contrast. Every kind of mark also has its own shape.
"""

from __future__ import annotations

from html import escape as html_escape

from gptmanager.terminal.printable import printable_lines

STYLE = """
.picture { --paper: #ffffff; --ink: #1f2328; --faint: #5b6470; --grid: #d9dee4;
  --context: #e69f00; --on-context: #1f2328; --generation: #0072b2; --on-generation: #ffffff;
  --paused: #b5478b; --memory: #009e73; --limit: #c23b22; }
@media (prefers-color-scheme: dark) { .picture { --paper: #15181d; --ink: #e8eaed;
  --faint: #a4acb7; --grid: #343b45; --context: #e69f00; --on-context: #15181d;
  --generation: #56b4e9; --on-generation: #15181d; --paused: #e58fc0; --memory: #2fbf95;
  --limit: #ff8a73; } }
.picture { font-family: system-ui, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 12px; }
.picture text { fill: var(--ink); }
.picture .paper { fill: var(--paper); }
.picture .title { font-size: 16px; font-weight: 600; }
.picture .faint { fill: var(--faint); }
.picture .small { font-size: 11px; }
.picture .mid { text-anchor: middle; }
.picture .end { text-anchor: end; }
.picture .grid { stroke: var(--grid); fill: none; }
.picture .halo { paint-order: stroke; stroke: var(--paper); stroke-width: 3; }
.picture .frame { stroke: var(--faint); fill: none; }
.picture .context { fill: var(--context); stroke: var(--context); stroke-width: 1.5;
  vector-effect: non-scaling-stroke; }
.picture .generation { fill: var(--generation); }
.picture .memory { fill: var(--memory); }
.picture text.on-context { fill: var(--on-context); }
.picture text.on-generation { fill: var(--on-generation); }
.picture .waiting, .picture .paused, .picture .held, .picture .finish, .picture .limit {
  fill: none; vector-effect: non-scaling-stroke; }
.picture .waiting { stroke: var(--faint); stroke-width: 1.5; }
.picture .paused { stroke: var(--paused); stroke-width: 2; }
.picture .held { stroke: var(--generation); stroke-width: 1; }
.picture .tokens { stroke-dasharray: 2 3; }
.picture .batch { stroke-dasharray: 8 4; }
.picture .static { stroke-dasharray: 8 3 2 3; }
.picture .other { stroke-dasharray: 2 3 2 8; }
.picture .finish { stroke: var(--ink); stroke-width: 2; }
.picture .limit { stroke: var(--limit); stroke-width: 1.5; stroke-dasharray: 6 4; }
.dense .waiting { stroke-width: .6; }
.dense .paused, .dense .finish { stroke-width: 1; }
.thin .plot .waiting, .thin .plot .held { stroke-width: .3; }
.thin .plot .context, .thin .plot .paused, .thin .plot .finish { stroke-width: .5; }
"""


def escape(words: str) -> str:
    """Escape a text for XML, and replace its control characters, most of which XML forbids."""
    return html_escape(printable_lines(words))


def number(value: float) -> str:
    """Format a number with at most two decimals and without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else str(int(value))


def element(name: str, *children: str, **attributes: str | float) -> str:
    """Return an SVG element without the attributes that are an empty text.

    For example, the attributes `class_` and `stroke_width` become `class` and `stroke-width`.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="'
        f'{escape(value) if isinstance(value, str) else number(value)}"'
        for key, value in attributes.items()
        if value != ""
    )
    inside = "".join(children)
    return f"<{name}{written}>{inside}</{name}>" if inside else f"<{name}{written}/>"


def label(x: float, y: float, words: str, class_: str = "", width: float | str = "") -> str:
    """Return a text with its baseline at `y`. If `width` is given, it is squeezed to it."""
    adjust = "spacingAndGlyphs" if width else ""
    return element(
        "text", escape(words), x=x, y=y, class_=class_, textLength=width, lengthAdjust=adjust
    )


def rect(
    x: float, y: float, width: float, height: float, class_: str, tip: str = "", round_: float = 0
) -> str:
    """Return a rectangle, with the tooltip `tip` and corners of the radius `round_`."""
    corner: dict[str, str | float] = {"rx": round_} if round_ else {}
    return element(
        "rect", *_tip(tip), x=x, y=y, width=width, height=height, class_=class_, **corner
    )


def path(commands: str, class_: str, tip: str = "") -> str:
    """Return a path, with the tooltip `tip`."""
    return element("path", *_tip(tip), d=commands, class_=class_)


def _tip(words: str) -> list[str]:
    """Return a list of the mark's tooltip element; an empty list if `words` is empty."""
    return [f"<title>{escape(words)}</title>"] if words else []
