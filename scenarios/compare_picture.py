"""A comparison as one SVG picture.

Owns: what is drawn and where. Refuses to know: how figures come about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from g2sim.scenarios.compare import Comparison, half_width
from g2sim.scenarios.svg import BLUE, FAINT, GREEN, GREY, INK, ORANGE, Scale, document, dot, line, text, tick_text

_WIDTH, _PANEL, _LABELS, _RIGHT = 1080, 540, 150, 30
_ROW, _TITLE, _AXIS, _GAP, _HEAD = 24, 42, 26, 16, 42

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
            text(left + 12, top + 17, title, size=13, bold=True),
            text(left + 12, top + 33, note, size=10),
        ]
        self._rows = len(rows)
        self._left, self._top = left + _LABELS, top + _TITLE
        self._span = _PANEL - _LABELS - _RIGHT
        self._scale = Scale.over(low, high)
        bottom = self._top + self._rows * _ROW
        for value in self._scale.ticks:
            x = self.x(value)
            self.out.append(line(x, self._top, x, bottom, INK if value == 0 else FAINT))
            self.out.append(text(x, bottom + 15, tick_text(value), size=10, anchor="middle"))
        for row, label in enumerate(rows):
            self.out.append(text(self._left - 8, self.y(row) + 4, _short(label), size=11, anchor="end", title=label))

    def x(self, value: float) -> float:
        return self._left + self._scale.part(value) * self._span

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
        self.out.append(dot(self.x(value), self.y(row), colour, what))

    def range(self, row: int, start: float, stop: float) -> None:
        self.out.append(line(self.x(start), self.y(row), self.x(stop), self.y(row), INK, width=1.5))

    def mark(self, row: int, value: float, colour: str, *, dashed: bool = False) -> None:
        """A short upright line."""
        x = self.x(value)
        self.out.append(line(x, self.y(row) - 11, x, self.y(row) + 11, colour, width=2.5, dashed=dashed))


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
    out = [text(12, 26, f"{told.scenario}: placement policies, {seeds}", size=16, bold=True)]
    for place, panel in enumerate(drawn):
        out += panel(place % 2 * _PANEL, _HEAD + place // 2 * height)
    total = _HEAD + (len(drawn) + 1) // 2 * height
    return document(_WIDTH, total, out)


def _latencies(told: Comparison, left: float, top: float, title: str, metric: str) -> Drawing:
    """p50, p90 and p99, means of the seeds."""
    columns = (("median", "p50", BLUE), ("p90", "p90", GREEN), ("p99", "p99", ORANGE))
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
    parts = (("g1_share", "G1", BLUE), ("g2_share", "G2", GREEN), ("computed_share", "computed", GREY))
    for row, policy in enumerate(told.policies):
        start = 0.0
        for metric, name, colour in parts:
            share = told.mean(policy, metric) or 0.0
            panel.bar(row, start, start + share, colour, f"{name} {share:.2f} %")
            start += share
        panel.mark(row, told.mean(policy, "hit_rate_best") or 0.0, INK)
        panel.mark(row, told.mean(policy, "hit_rate_unlimited") or 0.0, ORANGE, dashed=True)
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
            panel.bar(row, 0.0, mean, BLUE, f"{mean:.3f}")
            if width:
                panel.range(row, max(0.0, mean - width), mean + width)
    return panel.out


def _differences(told: Comparison, left: float, top: float) -> Drawing:
    title = f"mean TTFT minus that of {_short(told.policies[0])} [ms]"
    alike = "one seed" if len(told.seeds) == 1 else "all seeds give the same"
    note = "paired by seed, with 95 % interval" if told.seeds_differ else f"{alike}: no interval"
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
            panel.dot(row, gap.mean, ORANGE if gap.mean > 0 else GREEN, f"{gap.mean:.3f} ms")
    return panel.out


def _short(label: str) -> str:
    return label if len(label) <= 22 else f"{label[:20]}\u2026"
