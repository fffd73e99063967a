"""A matrix as a heat map in SVG: a word and a colour in each cell, the reason as its tooltip."""

from __future__ import annotations

from textwrap import shorten
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from runnerctl.cli.matrix_render import REFUSED, runners_of, says
from runnerctl.cli.render import outcome, reason

if TYPE_CHECKING:
    from runnerctl.decision import Decision
    from runnerctl.matrix import Matrix

_LINE = 22  # height of a row
_GLYPH = 7.2  # width of a character of a 12 px font, on the safe side
_MARGIN = 16
# Fill and text of runners in name order; told apart by people who see no red or green, too.
_COLOURS = (
    ("#c6dbef", "#08306b"),
    ("#c7e9c0", "#00441b"),
    ("#fee6ce", "#7f2704"),
    ("#dadaeb", "#3f007d"),
    ("#fff7bc", "#662506"),
)
_MIDDLE = {"text_anchor": "middle"}
_BOLD = {**_MIDDLE, "font_weight": "600"}
_REFUSED = ("#f0f0f0", "#737373")


def drawing(matrix: Matrix, *, tooltips: bool = True) -> str:
    """The text of an SVG file; nothing in it is loaded from elsewhere.

    Args:
        matrix: what to draw.
        tooltips: with the reason of each cell, which no page shows that embeds the file.
    """
    colours = {n: _COLOURS[i % len(_COLOURS)] for i, n in enumerate(runners_of(matrix))}
    colours[REFUSED] = _REFUSED
    names = _width([row.name for row in matrix.rows])
    kinds = _width([row.kind for row in matrix.rows])
    widths = [max(64.0, _width([column.name])) for column in matrix.columns]
    left = _MARGIN + names + kinds
    top = _MARGIN + _LINE
    width, height = left + sum(widths) + _MARGIN, top + _LINE * (len(matrix.rows) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#1f2933">',
        "<title>Which runner serves which model under which configuration</title>",
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
    ]
    starts = [left + sum(widths[:i]) for i in range(len(widths))]
    for column, x, wide in zip(matrix.columns, starts, widths, strict=True):
        title = f"<title>{escape(column.flags)}</title>" if column.flags else ""
        parts.append(
            _text(x + wide / 2, top - 8, column.name, title=title, **_MIDDLE, font_weight="600")
        )
    for number, row in enumerate(matrix.rows):
        y = top + number * _LINE
        parts.append(_text(_MARGIN, y + 15, row.name))
        parts.append(_text(_MARGIN + names, y + 15, row.kind, fill="#627d98"))
        for column, x, wide in zip(matrix.columns, starts, widths, strict=True):
            decision = row.decisions[column.name]
            where = f"{row.name}, {column.name}" if tooltips else ""
            parts.append(_cell(decision, where, (x, y, wide), colours))
    y, x = top + len(matrix.rows) * _LINE + 12, float(_MARGIN)
    for name, (fill, ink) in colours.items():
        label = "no runner serves it" if name == REFUSED else f"{name} serves it"
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="14" height="14" rx="3" fill="{fill}"/>')
        parts.append(_text(x + 20, y + 11.5, label, fill=ink))
        x += 20 + _width([label])
    return "\n".join([*parts, "</svg>", ""])


def _cell(
    decision: Decision,
    where: str,
    place: tuple[float, float, float],
    colours: dict[str, tuple[str, str]],
) -> str:
    x, y, wide = place
    said = says(decision)
    fill, ink = colours[said]
    title = ""
    if where:
        why = reason(decision) or " ".join(p.message for p in decision.errors)
        told = shorten(f"{where}: {outcome(decision, None)} {why}", 160, placeholder=" ...")
        title = f"<title>{escape(told)}</title>"
    return (
        f"<g>{title}"
        f'<rect x="{x + 1:g}" y="{y + 1:g}" width="{wide - 2:g}" height="{_LINE - 2}" rx="3" '
        f'fill="{fill}"/>{_text(x + wide / 2, y + 15, said, **_MIDDLE, fill=ink)}</g>'
    )


def _text(x: float, y: float, text: str, *, title: str = "", **style: str) -> str:
    """Text with its middle or its start at `x`; `style` are attributes, `_` for `-`."""
    named = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in style.items())
    return f'<text x="{x:g}" y="{y:g}"{named}>{title}{escape(text)}</text>'


def _width(texts: list[str]) -> float:
    return max((len(text) for text in texts), default=0) * _GLYPH + 14
