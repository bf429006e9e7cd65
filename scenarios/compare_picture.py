"""A comparison as one SVG picture.

Owns: what is drawn and where. Refuses to know: how figures come about.

Written by hand, without a plotting library: six panels of bars, ranges and intervals need lines, rectangles and text,
and the same comparison gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from g2sim.scenarios.compare import Comparison, half_width

_WIDTH, _PANEL, _LABELS, _RIGHT = 1080, 540, 150, 30
_ROW, _TITLE, _AXIS, _GAP, _HEAD = 24, 42, 26, 16, 42
_TICKS = 4
_INK, _FAINT = "#222", "#ddd"
_BLUE, _GREEN, _GREY, _ORANGE = "#0072b2", "#009e73", "#c4c4c4", "#d55e00"

Drawing = list[str]


class _Panel:
    """A panel with one row a policy and one scale.

    Args:
        left, top: its corner [px].
        low, high: ends of the scale.
    """

    def __init__(
        self, left: float, top: float, title: str, rows: Sequence[str], low: float, high: float, note: str = ""
    ) -> None:
        self.out: Drawing = [
            _text(left + 12, top + 17, title, size=13, bold=True),
            _text(left + 12, top + 33, note, size=10),
        ]
        self._rows = len(rows)
        self._left, self._top = left + _LABELS, top + _TITLE
        self._span = _PANEL - _LABELS - _RIGHT
        if high <= low:
            high = low + 1.0
        step = _step(high - low)
        self._low, self._high = math.floor(low / step) * step, math.ceil(high / step) * step
        bottom = self._top + self._rows * _ROW
        for k in range(round((self._high - self._low) / step) + 1):
            value = self._low + k * step
            x = self.x(value)
            self.out.append(_line(x, self._top, x, bottom, _INK if value == 0 else _FAINT))
            self.out.append(_text(x, bottom + 15, f"{round(value, 9):g}", size=10, anchor="middle"))
        for row, label in enumerate(rows):
            self.out.append(_text(self._left - 8, self.y(row) + 4, _short(label), size=11, anchor="end", title=label))

    def x(self, value: float) -> float:
        return self._left + (value - self._low) / (self._high - self._low) * self._span

    def y(self, row: int) -> float:
        """Middle of a row."""
        return self._top + (row + 0.5) * _ROW

    def bar(self, row: int, start: float, stop: float, colour: str, what: str) -> None:
        x, width = self.x(start), self.x(stop) - self.x(start)
        self.out.append(
            f'<rect x="{x:.2f}" y="{self.y(row) - 8:.2f}" width="{width:.2f}" height="16" fill="{colour}">'
            f"<title>{escape(what)}</title></rect>"
        )

    def dot(self, row: int, value: float, colour: str, what: str) -> None:
        self.out.append(
            f'<circle cx="{self.x(value):.2f}" cy="{self.y(row):.2f}" r="4.5" fill="{colour}" stroke="{_INK}">'
            f"<title>{escape(what)}</title></circle>"
        )

    def range(self, row: int, start: float, stop: float) -> None:
        self.out.append(_line(self.x(start), self.y(row), self.x(stop), self.y(row), _INK, width=1.5))

    def mark(self, row: int, value: float, colour: str, *, dashed: bool = False) -> None:
        """A short upright line."""
        x = self.x(value)
        self.out.append(_line(x, self.y(row) - 11, x, self.y(row) + 11, colour, width=2.5, dashed=dashed))


def render_picture(told: Comparison) -> str:
    """The text of an SVG file."""
    height = _TITLE + len(told.policies) * _ROW + _AXIS + _GAP
    drawn: list[Callable[[float, float], Drawing]] = [
        lambda x, y: _latencies(told, x, y, "TTFT", "ttft"),
        lambda x, y: _latencies(told, x, y, "E2E latency", "e2e_latency"),
        lambda x, y: _hits(told, x, y),
        lambda x, y: _bars(told, x, y, "requests within SLA [%]", "good_share", 100.0),
        lambda x, y: _differences(told, x, y),
        lambda x, y: _bars(told, x, y, "overlap regret [blocks a request]", "regret_blocks", 0.0),
    ]
    seeds = f"{len(told.seeds)} seeds from {told.seeds[0]}" if len(told.seeds) > 1 else f"seed {told.seeds[0]}"
    out = [_text(12, 26, f"{told.scenario}: placement policies, {seeds}", size=16, bold=True)]
    for place, panel in enumerate(drawn):
        out += panel(place % 2 * _PANEL, _HEAD + place // 2 * height)
    total = _HEAD + (len(drawn) + 1) // 2 * height
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{total}" viewBox="0 0 {_WIDTH} {total}" '
        f'font-family="sans-serif"><rect width="{_WIDTH}" height="{total}" fill="white"/>'
    )
    return "\n".join([head, *out, "</svg>"]) + "\n"


def _latencies(told: Comparison, left: float, top: float, title: str, metric: str) -> Drawing:
    """p50, p90 and p99, means of the seeds."""
    columns = (("median", "p50", _BLUE), ("p90", "p90", _GREEN), ("p99", "p99", _ORANGE))
    values = [[told.mean(policy, f"{column}_{metric}_ms") for column, _, _ in columns] for policy in told.policies]
    high = max((value for row in values for value in row if value is not None), default=1.0)
    panel = _Panel(left, top, f"{title} [ms]", told.policies, 0.0, high, "p50 blue, p90 green, p99 orange")
    for row, found in enumerate(values):
        marks = [
            (value, f"{short} {value:.3f} ms", colour)
            for value, (_, short, colour) in zip(found, columns, strict=True)
            if value is not None
        ]
        if marks:
            panel.range(row, marks[0][0], marks[-1][0])
        for value, what, colour in marks:
            panel.dot(row, value, colour, what)
    return panel.out


def _hits(told: Comparison, left: float, top: float) -> Drawing:
    note = "G1 blue, G2 green, computed grey; black line: best placement, orange: unlimited cache"
    panel = _Panel(left, top, "where prompt tokens come from [%]", told.policies, 0.0, 100.0, note)
    parts = (("g1_share", "G1", _BLUE), ("g2_share", "G2", _GREEN), ("computed_share", "computed", _GREY))
    for row, policy in enumerate(told.policies):
        start = 0.0
        for metric, name, colour in parts:
            share = told.mean(policy, metric) or 0.0
            panel.bar(row, start, start + share, colour, f"{name} {share:.2f} %")
            start += share
        panel.mark(row, told.mean(policy, "hit_rate_best") or 0.0, _INK)
        panel.mark(row, told.mean(policy, "hit_rate_unlimited") or 0.0, _ORANGE, dashed=True)
    return panel.out


def _bars(told: Comparison, left: float, top: float, title: str, metric: str, least_high: float) -> Drawing:
    """Means of the seeds with their intervals."""
    means = [told.mean(policy, metric) for policy in told.policies]
    if all(mean is None for mean in means):
        return _Panel(left, top, f"{title}: nothing to measure", told.policies, 0.0, 1.0).out
    widths = [half_width(told.values(policy, metric)) or 0.0 for policy in told.policies]
    high = max(least_high, *((mean or 0.0) + width for mean, width in zip(means, widths, strict=True)))
    panel = _Panel(left, top, title, told.policies, 0.0, high)
    for row, (mean, width) in enumerate(zip(means, widths, strict=True)):
        if mean is not None:
            panel.bar(row, 0.0, mean, _BLUE, f"{mean:.3f}")
            if width:
                panel.range(row, max(0.0, mean - width), mean + width)
    return panel.out


def _differences(told: Comparison, left: float, top: float) -> Drawing:
    title = f"mean TTFT minus that of {_short(told.policies[0])} [ms]"
    note = "paired by seed, with 95 % interval" if len(told.seeds) > 1 else "one seed: no interval"
    found = [told.difference(policy, "mean_ttft_ms") for policy in told.policies]
    ends = [0.0]
    for gap in found:
        if gap is not None:
            ends += [gap.mean - (gap.half_width or 0.0), gap.mean + (gap.half_width or 0.0)]
    panel = _Panel(left, top, title, told.policies, min(ends), max(ends), note)
    for row, gap in enumerate(found):
        if gap is not None and row:
            if gap.half_width:
                panel.range(row, gap.mean - gap.half_width, gap.mean + gap.half_width)
            panel.dot(row, gap.mean, _ORANGE if gap.mean > 0 else _GREEN, f"{gap.mean:.3f} ms")
    return panel.out


def _short(label: str) -> str:
    return label if len(label) <= 22 else f"{label[:20]}\u2026"


def _step(span: float) -> float:
    """A round distance of ticks: 1, 2 or 5 times a power of ten, about ``_TICKS`` of them."""
    power: float = 10.0 ** math.floor(math.log10(span / _TICKS))
    return power * next(factor for factor in (1, 2, 5, 10) if factor * power >= span / _TICKS * 0.999)


def _text(
    x: float, y: float, text: str, *, size: int, anchor: str = "start", bold: bool = False, title: str = ""
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    full = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size}" text-anchor="{anchor}" fill="{_INK}"{weight}>'
        f"{full}{escape(text)}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: float = 1, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="3 2"' if dashed else ""
    ends = f'x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"{dash}/>'
