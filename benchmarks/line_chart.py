"""Lines over two logarithmic axes as SVG, without any dependency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

LEFT, TOP, WIDTH, HEIGHT, LEGEND = 70, 20, 560, 380, 330


@dataclass(frozen=True, slots=True)
class Line:
    """Points joined in order."""

    label: str
    colour: str
    points: Sequence[tuple[float, float]]
    """(x, y), both above zero."""
    dashed: bool = False


def line_chart(lines: Sequence[Line], across: str, up: str) -> str:
    """The picture; the legend lists lines in the order given. Both axes cover all points."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    low_x, high_x = math.log2(min(xs)), math.log2(max(xs))
    low_y, high_y = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))

    def place(x: float, y: float) -> tuple[float, float]:
        right = (math.log2(x) - low_x) / max(high_x - low_x, 1) * WIDTH
        above = (math.log10(y) - low_y) / max(high_y - low_y, 1) * HEIGHT
        return LEFT + right, TOP + HEIGHT - above

    bottom, whole = TOP + HEIGHT, LEFT + WIDTH + LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="{bottom + 50}">',
        "<style>text { font: 12px sans-serif }</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="#fafafa"/>',
    ]
    for power in range(low_y, high_y + 1):
        _, y = place(min(xs), 10.0**power)
        parts += [
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + WIDTH}" y2="{y:.1f}" stroke="#ddd"/>',
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>',
        ]
    for mark in sorted(set(xs)):
        x, _ = place(mark, 10.0**low_y)
        parts += [
            f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#eee"/>',
            f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{mark:g}</text>',
        ]
    beside = f"translate(16 {TOP + HEIGHT / 2}) rotate(-90)"
    for where, title in (
        (f'x="{LEFT + WIDTH / 2}" y="{bottom + 38}"', across),
        (f'transform="{beside}"', up),
    ):
        parts.append(f'<text {where} text-anchor="middle">{escape(title)}</text>')
    for number, line in enumerate(lines):
        corners = [place(x, y) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
        stroke = f'stroke="{line.colour}" stroke-width="2"{dashes}'
        parts.append(f'<polyline points="{path}" fill="none" {stroke}/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.colour}"/>' for x, y in corners
        ]
        y = TOP + 12 + 20 * number
        x = LEFT + WIDTH + 16
        parts += [
            f'<line x1="{x}" y1="{y}" x2="{x + 26}" y2="{y}" {stroke}/>',
            f'<text x="{x + 32}" y="{y + 4}">{escape(line.label)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])
