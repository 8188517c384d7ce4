#!/usr/bin/env python
"""Draws the README's figure, ``docs/figure.svg``, from the committed runs of the study (docs/study/results.json)."""

import json
import math
import statistics
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FIGURE = REPOSITORY / "docs" / "figure.svg"
sys.path.insert(0, str(REPOSITORY / "examples"))
import study  # noqa: E402 - its folder is not a package

NAMES = {
    ("synthetic", "small"): "reasoning puzzles, 0.1M parameters",
    ("synthetic", "medium"): "reasoning puzzles, 0.5M parameters",
    ("text", "small"): "text, 0.1M parameters",
    ("text", "medium"): "text, 0.5M parameters",
}
LEFT, SCALE, ROW, TOP = 450, 1500, 34, 62  # pixels: where 0 lies, pixels a nat, height of a row, first row
COLORS = {"paper": "#8c8c8c", "ours": "#2f6fb0"}


def rows() -> list[tuple[str, str, list[float]]]:
    """(label, colour, by how much the loss of R = 2 is lower: one number, or one a seed) from top to bottom."""
    runs = json.loads((study.OUTPUT / "results.json").read_text(encoding="utf-8"))["runs"]
    variants = study.VARIANTS
    paper = math.log(variants["plain"].paper / variants["r2"].paper)
    found = [("the paper, Table 9: the Pile, 405M", COLORS["paper"], [paper])]
    for cell, losses in study.collect(study.reported(runs), "loss").items():
        seeds = sorted(losses["plain"].keys() & losses["r2"].keys())
        gains = [losses["plain"][seed] - losses["r2"][seed] for seed in seeds]
        found.append((f"here: {NAMES[cell]}", COLORS["ours"], gains))
    return found


def draw() -> str:
    """The figure as SVG."""
    found = rows()
    width, height = 720, TOP + ROW * len(found) + 52
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<text x="16" y="26" font-size="16">Loss below that of plain attention, same data and steps</text>',
        '<text x="16" y="46" fill="#555">DCFormer++ (R = 2), nats per token. Bars: means; dots: seeds.</text>',
    ]
    bottom = TOP + ROW * len(found)
    for tick in (-0.1, -0.05, 0.0, 0.05, 0.1, 0.15):
        x = LEFT + tick * SCALE
        lines.append(
            f'<line x1="{x:.0f}" y1="{TOP}" x2="{x:.0f}" y2="{bottom}" stroke="{"#333" if not tick else "#ddd"}"/>'
        )
        lines.append(f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="middle" fill="#555">{tick:g}</text>')
    for row, (label, color, gains) in enumerate(found):
        y, mean = TOP + ROW * row + ROW // 2, statistics.mean(gains)
        start, end = sorted((LEFT, LEFT + mean * SCALE))
        lines.append(f'<text x="16" y="{y + 4}">{label}</text>')
        lines.append(f'<rect x="{start:.1f}" y="{y - 9}" width="{end - start:.1f}" height="18" fill="{color}"/>')
        if len(gains) > 1:
            circles = (
                f'<circle cx="{LEFT + gain * SCALE:.1f}" cy="{y}" r="3.5" fill="white" stroke="#222"/>'
                for gain in gains
            )
            lines += circles
    lines.append(f'<text x="16" y="{bottom + 40}" fill="#555">Right of 0: composition has the lower loss.</text>')
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    FIGURE.write_text(draw(), encoding="utf-8")
    print(FIGURE)
