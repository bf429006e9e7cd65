"""Parts of SVG pictures, as text: written by hand, without a plotting library, so that equal input gives equal bytes.

Owns: how text, lines and scales look. Refuses to know: what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from xml.sax.saxutils import escape

import attrs

INK, FAINT = "#222", "#ddd"
BLUE, GREEN, GREY, ORANGE = "#0072b2", "#009e73", "#c4c4c4", "#d55e00"
_TICKS = 4


def document(width: float, height: float, parts: Iterable[str]) -> str:
    """The text of an SVG file of a size in px."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif"><rect width="{width}" height="{height}" fill="white"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def tick_step(span: float) -> float:
    """A round distance of ticks: 1, 2 or 5 times a power of ten, about ``_TICKS`` of them."""
    power: float = 10.0 ** math.floor(math.log10(span / _TICKS))
    return power * next(factor for factor in (1, 2, 5, 10) if factor * power >= span / _TICKS * 0.999)


@attrs.frozen
class Scale:
    """From one round number to another, both multiples of a round step."""

    step: float
    first: int
    last: int

    @classmethod
    def over(cls, low: float, high: float) -> Scale:
        """The tightest one that holds both; of some length even if they are equal."""
        if high <= low:
            high = low + 1.0
        step = tick_step(high - low)
        return cls(step, math.floor(low / step), math.ceil(high / step))

    @property
    def ticks(self) -> list[float]:
        return [self.step * k for k in range(self.first, self.last + 1)]

    def part(self, value: float) -> float:
        """Where a value stands: 0 at the low end, 1 at the high one."""
        return (value / self.step - self.first) / (self.last - self.first)


def tick_text(value: float) -> str:
    return f"{round(value, 9):g}"


def levels(scale: Scale, left: float, top: float, width: float, height: float) -> list[str]:
    """An upright scale: a line across and a number for each of its ticks."""
    parts = []
    for k, value in enumerate(scale.ticks):
        y = top + (1 - scale.part(value)) * height
        parts.append(line(left, y, left + width, y, FAINT if k else INK))
        parts.append(text(left - 8, y + 4, tick_text(value), size=10, anchor="end"))
    return parts


def text(
    x: float, y: float, words: str, *, size: int, anchor: str = "start", bold: bool = False, title: str = ""
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    full = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size}" text-anchor="{anchor}" fill="{INK}"{weight}>'
        f"{full}{escape(words)}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: float = 1, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="3 2"' if dashed else ""
    ends = f'x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"{dash}/>'


def dot(x: float, y: float, colour: str, what: str) -> str:
    """A circle; ``what`` shows when the pointer is over it."""
    at = f'cx="{x:.2f}" cy="{y:.2f}" r="4.5"'
    return f'<circle {at} fill="{colour}" stroke="{INK}"><title>{escape(what)}</title></circle>'
