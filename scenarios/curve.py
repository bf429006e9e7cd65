"""Cache hits and time to first token against the sizes of the caches.

Owns: which fields of a scenario are the sizes, and the picture. Refuses to know: how points are run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from g2sim.bus.errors import ConfigError
from g2sim.scenarios.compare import LEVEL, mean_of
from g2sim.scenarios.processes import Progress
from g2sim.scenarios.schema import load_scenario
from g2sim.scenarios.svg import BLUE, GREEN, GREY, ORANGE, Scale, document, dot, levels, line, text
from g2sim.scenarios.sweep import IN_THIS_PROCESS, Point, Row, Runner, Sweep, run_points

HOST, GPU = "host_blocks", "gpu_blocks"
MAX_LINES = 6

_COLOURS = (BLUE, ORANGE, GREEN, "#cc79a7", "#e69f00", "#56b4e9")
_WIDTH, _PANEL, _HEIGHT, _HEAD = 1080, 540, 300, 66
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 46, 58


def curve(
    path: Path,
    host_blocks: Sequence[int],
    gpu_blocks: Sequence[int] | None,
    *,
    seeds: int = 1,
    runner: Runner = IN_THIS_PROCESS,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Run a scenario with every combination of sizes.

    Args:
        host_blocks: capacities of each host pool (G2) [blocks]; 0 is no host tier.
        gpu_blocks: capacities of each rank's GPU cache (G1) [blocks], of all roles; None leaves the scenario's.
        seeds: runs of each point; runner, folder, progress: as for ``run_points``.
    Raises: ConfigError, also if the scenario has no host tier; SimError if ``runner`` fails.
    """
    pools = load_scenario(path).deployment.pools
    caches = {pool.role: f"engine.workers.{pool.role.value}.kv_cache" for pool in pools}
    tiers = [f"{caches[pool.role]}.host_offload" for pool in pools if pool.rank.host is not None]
    if not tiers:
        hint = f"give {next(iter(caches.values()))}.host_offload; --host-blocks changes its num_host_blocks"
        raise ConfigError("--host-blocks", problem=f"{path} has no host tier", hint=hint)
    axes = ({} if gpu_blocks is None else {GPU: gpu_blocks}) | {HOST: host_blocks}
    points = []
    for sizes in itertools.product(*axes.values()):
        labels = dict(zip(axes, sizes, strict=True))
        host, changes = labels[HOST], dict[str, Any]()
        for tier in tiers:
            changes |= {f"{tier}.num_host_blocks": host} if host else {tier: None}
        if GPU in labels:
            changes |= {f"{cache}.capacity.blocks": labels[GPU] for cache in caches.values()}
        points += [Point(labels, changes, shift) for shift in range(seeds)]
    return run_points(path, axes, points, runner=runner, folder=folder, progress=progress)


def render_curve(found: Sweep) -> str:
    """The text of an SVG file: means of the seeds, a line for each size of G1, at most ``MAX_LINES`` of them.

    An upright line through a mean is its interval (``compare.half_width``). Points with a failed run are left out.
    """
    lines = list(found.axes.get(GPU, [None]))
    seeds = found.seeds
    which = f"seed {seeds[0]}"
    if len(seeds) > 1:
        which = f"means of {len(seeds)} seeds from {seeds[0]}, {LEVEL:.0%} intervals"
    parts = [text(12, 26, f"{found.scenario}: sizes of the caches, {which}", size=16, bold=True)]
    x = 12.0
    for size, colour in zip(lines, _COLOURS, strict=False):
        if size is not None:
            parts += [line(x, 46, x + 24, 46, colour, width=2.5), text(x + 30, 50, f"G1 {size} blocks", size=12)]
            x += 170
    panels: tuple[tuple[str, str, Callable[[Row], float | None]], ...] = (
        ("prompt tokens from G1 or G2 [%]", "grey: unlimited cache", _hits),
        ("prompt tokens from G2 [%]", "", lambda row: row.value("g2_share")),
        ("TTFT mean [ms]", "", lambda row: row.value("mean_ttft_ms")),
        ("TTFT p99 [ms]", "", lambda row: row.value("p99_ttft_ms")),
    )
    for place, (title, note, figure) in enumerate(panels):
        corner = (place % 2 * _PANEL, _HEAD + place // 2 * _HEIGHT)
        bound = mean_of([row.value("hit_rate_unlimited") for row in found.rows]) if note else None
        parts += _panel(found, lines, corner, title, note, figure, None if bound is None else bound.value)
    return document(_WIDTH, _HEAD + 2 * _HEIGHT, parts)


def _panel(
    found: Sweep,
    lines: Sequence[int | None],
    corner: tuple[int, int],
    title: str,
    note: str,
    figure: Callable[[Row], float | None],
    bound: float | None,
) -> list[str]:
    """``bound``: a level that is drawn across. Sizes of G2 stand at equal distances, as they may start at 0."""
    left, top = corner[0] + _LEFT, corner[1] + _TOP
    width, height = _PANEL - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    sizes = found.axes[HOST]
    drawn = [
        [mean_of([figure(row) for row in found.rows if row.labels[HOST] == size and row.labels.get(GPU) == gpu])
         for size in sizes]
        for gpu in lines
    ]  # fmt: skip
    ends = [mean.value + (mean.half_width or 0.0) for means in drawn for mean in means if mean is not None]
    highest = max([bound or 0.0, *ends])
    scale = Scale.over(0.0, highest)

    def at_x(idx: int) -> float:
        return left + (idx + 0.5) / len(sizes) * width

    def at_y(value: float) -> float:
        return top + (1 - scale.part(value)) * height

    parts = [text(corner[0] + 12, corner[1] + 17, title, size=13, bold=True)]
    parts.append(text(corner[0] + 12, corner[1] + 33, note, size=10))
    parts += levels(scale, left, top, width, height)
    every = -(-len(sizes) // 10)
    for idx in range(0, len(sizes), every):
        parts.append(text(at_x(idx), top + height + 16, str(sizes[idx]), size=10, anchor="middle"))
    parts.append(
        text(left + width / 2, top + height + 34, "blocks of a G2 pool (at equal distances)", size=11, anchor="middle")
    )
    if bound is not None:
        parts.append(line(left, at_y(bound), left + width, at_y(bound), GREY, width=2.5, dashed=True))
    for gpu, means, colour in zip(lines, drawn, _COLOURS, strict=False):
        spots = [(idx, mean) for idx, mean in enumerate(means) if mean is not None]
        for (idx, mean), (other, end) in itertools.pairwise(spots):
            parts.append(line(at_x(idx), at_y(mean.value), at_x(other), at_y(end.value), colour, width=2.5))
        for idx, mean in spots:
            if mean.half_width is not None:
                low, high = max(0.0, mean.value - mean.half_width), mean.value + mean.half_width
                parts.append(line(at_x(idx), at_y(low), at_x(idx), at_y(high), colour, width=1.5))
            what = f"{mean} with {sizes[idx]} blocks" + ("" if gpu is None else f", G1 {gpu} blocks")
            parts.append(dot(at_x(idx), at_y(mean.value), colour, what))
    return parts


def _hits(row: Row) -> float | None:
    g1, g2 = row.value("g1_share"), row.value("g2_share")
    return None if g1 is None or g2 is None else g1 + g2
