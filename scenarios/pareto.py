"""Which points of a sweep no other one beats in both of two figures, and a picture of them.

Owns: which way a figure is better, the front, and the picture. Refuses to know: how points are run.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import attrs

from g2sim.bus.errors import ConfigError, close_to
from g2sim.scenarios.compare import Metric
from g2sim.scenarios.svg import FAINT, GREY, INK, ORANGE, Scale, document, dot, levels, line, text, tick_text
from g2sim.scenarios.sweep import METRICS, Sweep, cell

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 1080, 560, 72, 36, 66, 60
_LISTED = 12
_WORDS = {"higher": "more is better", "lower": "less is better"}


def read_goals(given: str) -> tuple[Metric, Metric]:
    """The two figures of a ``X,Y`` text, each with the way in which it is better.

    ``+NAME`` says that more is better, ``-NAME`` that less is; without a sign it is as in the list of figures.

    Raises: ConfigError.
    """
    goals = [_goal(name.strip()) for name in given.split(",")]
    if len(goals) != 2 or goals[0].name == goals[1].name:
        raise ConfigError("--pareto", got=given, allowed="two different figures with a comma between them")
    return goals[0], goals[1]


def _goal(given: str) -> Metric:
    known = {metric.name: metric for metric in METRICS}
    name = given.removeprefix("+") if given.startswith("+") else given.removeprefix("-")
    if name not in known:
        raise ConfigError("--pareto", got=given, allowed=", ".join(known), hint=close_to(name, known))
    metric = known[name]
    if name != given:
        return attrs.evolve(metric, better="higher" if given.startswith("+") else "lower")
    if not metric.better:
        hint = f"+{name} says that more is better, -{name} that less is"
        raise ConfigError("--pareto", problem=f"{name} has no better direction of its own", hint=hint)
    return metric


@attrs.frozen
class Spot:
    """A combination of values: its means over the seeds, as the goals have them, and whether it is on the front."""

    labels: Mapping[str, Any]
    values: tuple[float, float]
    on_front: bool


def spots(found: Sweep, goals: tuple[Metric, Metric]) -> list[Spot | None]:
    """For each combination of the sweep, in order; None if a run failed or had nothing to measure.

    On the front is what no other one equals in one figure and beats in the other, or beats in both; equal ones are
    on it together.
    """
    means = [
        None if x is None or y is None else (x.value, y.value)
        for x, y in zip(*(found.means(goal.name) for goal in goals), strict=True)
    ]
    signs = [-1.0 if goal.better == "higher" else 1.0 for goal in goals]
    front = set[tuple[float, float]]()
    least = float("inf")
    # Best x first, so that a spot is beaten exactly if one before it has a y that is as good.
    for pair in sorted({pair for pair in means if pair is not None}, key=lambda p: (signs[0] * p[0], signs[1] * p[1])):
        if signs[1] * pair[1] < least:
            least = signs[1] * pair[1]
            front.add(pair)
    return [
        None if pair is None else Spot(rows[0].labels, pair, pair in front)
        for rows, pair in zip(found.combinations, means, strict=True)
    ]


def marked(found: Sweep, goals: tuple[Metric, Metric]) -> Sweep:
    """The sweep with a verdict for each row: whether its combination is on the front, None if it has no figures."""
    marks = [
        None if spot is None else spot.on_front
        for spot, rows in zip(spots(found, goals), found.combinations, strict=True)
        for _ in rows
    ]
    return attrs.evolve(found, goals=goals, on_front=tuple(marks))


def render_front(found: Sweep) -> str:
    """The text of an SVG file, for a sweep that is ``marked``."""
    assert found.goals is not None
    across, up = found.goals
    seen = [spot for spot in spots(found, found.goals) if spot is not None]
    front = sorted((spot for spot in seen if spot.on_front), key=lambda spot: spot.values)
    scales = [_scale([spot.values[axis] for spot in seen]) for axis in (0, 1)]
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + scales[0].part(x) * width, _TOP + (1 - scales[1].part(y)) * height

    seeds = found.seeds
    which = f"means of {len(seeds)} seeds from {seeds[0]}" if len(seeds) > 1 else f"seed {seeds[0]}"
    parts = [
        text(12, 26, f"{found.scenario}: Pareto front, {which}", size=16, bold=True),
        text(12, _TOP - 14, _axis(up), size=11),
    ]
    for k, value in enumerate(scales[0].ticks):
        x, _ = at(value, 0.0)
        parts.append(line(x, _TOP, x, _TOP + height, FAINT if k else INK))
        parts.append(text(x, _TOP + height + 16, tick_text(value), size=10, anchor="middle"))
    parts += levels(scales[1], _LEFT, _TOP, width, height)
    parts.append(text(_LEFT + width / 2, _HEIGHT - 18, _axis(across), size=11, anchor="middle"))
    # Steps: what lies behind the line is beaten by a spot on it.
    ordered = front if across.better == "lower" else front[::-1]
    for one, other in itertools.pairwise(ordered):
        (x1, y1), (x2, y2) = at(*one.values), at(*other.values)
        parts += [line(x1, y1, x2, y1, ORANGE, width=2), line(x2, y1, x2, y2, ORANGE, width=2)]
    for spot in sorted(seen, key=lambda spot: spot.on_front):
        parts.append(dot(*at(*spot.values), ORANGE if spot.on_front else GREY, _told(found, spot)))
    numbers = {pair: number for number, pair in enumerate(dict.fromkeys(spot.values for spot in front), 1)}
    for pair, number in numbers.items():
        x, y = at(*pair)
        parts.append(text(x + 7, y - 7, str(number), size=11, bold=True))
    listed = [f"{numbers[spot.values]}: {_told(found, spot)}" for spot in front[:_LISTED]]
    if len(front) > _LISTED:
        listed.append(f"and {len(front) - _LISTED} more")
    parts += [text(12, _HEIGHT + 16 * row, words, size=11) for row, words in enumerate(listed, 1)]
    return document(_WIDTH, _HEIGHT + 16 * len(listed) + 14, parts)


def _told(found: Sweep, spot: Spot) -> str:
    assert found.goals is not None
    named = zip(found.short_columns, spot.labels.values(), strict=True)
    figures = zip(found.goals, spot.values, strict=True)
    return ", ".join(
        [*(f"{name}={cell(value)}" for name, value in named)]
        + [f"{goal.label} {value:.6g} {goal.unit}" for goal, value in figures]
    )


def _scale(values: list[float]) -> Scale:
    """From the smallest to the largest, or from 0 if that is not far off; 0 to 1 for no values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    return Scale.over(0.0 if 0.0 <= low <= high / 3 else low, high)


def _axis(goal: Metric) -> str:
    return f"{goal.label} [{goal.unit}] ({_WORDS[goal.better]})"
