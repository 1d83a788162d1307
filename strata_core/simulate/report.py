"""What replays came to, as a table and as plots."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from xml.sax.saxutils import escape

import attrs

from strata_core.simulate.outcome import Outcome

MIB = 1 << 20
_SOURCES = ("live", "ram", "warm", "cold")
_COUNTS = ("evictions", "demotions", "disk_evictions", "discards", "superseded", "compacted", "restore_failures")
_COLOURS = ("#c0392b", "#2471a3", "#1e8449", "#b7950b", "#7d3c98", "#566573")


def table(outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: one column for each replay."""
    rows = [_row("requests", outcomes, lambda o: o.requests)]
    if any(o.unfinished for o in outcomes):
        rows.append(_row("  not ended", outcomes, lambda o: o.unfinished))
    rows.append(_row("prompt tokens", outcomes, lambda o: o.prompt))
    sources = [*_SOURCES, *sorted({name for o in outcomes for name in o.hits} - {*_SOURCES, "none"})]
    for name in sources:
        if any(o.hits[name] for o in outcomes):
            cells = [f"{o.reused[name]:,} in {o.hits[name]}" for o in outcomes]
            rows.append([f"  reused from {name}", *cells])
    rows.append(["  read", *(f"{o.read:,}" for o in outcomes)])
    rows.append(_row("tokens read again", outcomes, lambda o: o.reread_tokens))
    for reason in sorted({reason for o in outcomes for reason in o.reread}):
        rows.append(_row(f"  {reason}", outcomes, lambda o, reason=reason: o.reread[reason]))
    for name in sorted({name for o in outcomes for name in o.written}):
        rows.append(
            [f"written to {name}", *(f"{o.written[name] // MIB:,} MiB" if name in o.written else "-" for o in outcomes)]
        )
    for name in ("out_of_memory", *_COUNTS):
        if any(o.counts.get(name) for o in outcomes) or name in ("evictions", "discards"):
            rows.append(_row(name.replace("_", " "), outcomes, lambda o, name=name: o.counts.get(name, 0)))
    rows.append(["time reading prompts", *(f"{o.reading_s:,.1f} s" for o in outcomes)])
    for name in sorted({name for o in outcomes for name in o.restoring_s}):
        rows.append([f"time restoring from {name}", *(f"{o.restoring_s.get(name, 0.0):,.1f} s" for o in outcomes)])
    rows.append(["first token after, median", *(_median(o) for o in outcomes)])
    rows.append(["simulated time", *(f"{o.seconds:,.1f} s" for o in outcomes)])
    return ["", *(o.label for o in outcomes)], rows


def _row(name: str, outcomes: Sequence[Outcome], value: object) -> list[str]:
    assert callable(value)
    return [name, *(f"{value(o):,}" for o in outcomes)]


def _median(outcome: Outcome) -> str:
    return f"{statistics.median(outcome.first_token_s):,.1f} s" if outcome.first_token_s else "-"


@attrs.frozen
class _Scale:
    """Largest second and largest number of tokens of all curves, at least 1 each."""

    seconds: float
    tokens: int

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> _Scale:
        return cls(max([1.0, *(o.seconds for o in outcomes)]), max([1, *(o.reread_tokens for o in outcomes)]))


def curve(outcome: Outcome) -> list[tuple[float, int]]:
    """Tokens that were read again until each second at which some were, from 0 to the end."""
    points, total = [(0.0, 0)], 0
    for second, tokens in outcome.rereads:
        points.append((second, total))
        total += tokens
        points.append((second, total))
    return [*points, (outcome.seconds, total)]


def text_plot(outcomes: Sequence[Outcome], width: int = 72, height: int = 12) -> list[str]:
    """Tokens read again over time, a letter for each replay; ``*`` where several meet."""
    scale = _Scale.of(outcomes)
    cells = [[" "] * width for _ in range(height)]
    for number, outcome in enumerate(outcomes):
        letter, points = chr(ord("a") + number % 26), curve(outcome)
        place, value = 0, 0
        for column in range(width):
            end = (column + 1) / width * scale.seconds
            while place < len(points) and points[place][0] <= end:
                value = points[place][1]
                place += 1
            row = height - 1 - min(height - 1, value * height // (scale.tokens + 1))
            cells[row][column] = letter if cells[row][column] == " " else "*"
    lines = ["tokens read again"]
    for number, cell in enumerate(cells):
        label = f"{scale.tokens:,}" if number == 0 else "0" if number == height - 1 else ""
        lines.append(f"{label:>12} |{''.join(cell).rstrip()}")
    lines.append(f"{'':>12} +{'-' * width}")
    lines.append(f"{'':>12}  0 s{f'{scale.seconds:,.0f} s':>{width - 3}}")
    lines += [f"{chr(ord('a') + number % 26):>14}  {outcome.label}" for number, outcome in enumerate(outcomes)]
    return lines


def svg_plot(outcomes: Sequence[Outcome], width: int = 720, height: int = 360) -> str:
    """The same as an SVG document."""
    scale = _Scale.of(outcomes)
    left, top, inner, tall = 90, 30, width - 110, height - 90
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 20 * len(outcomes)}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="18">tokens read again</text>',
        f'<path d="M{left} {top}V{top + tall}H{left + inner}" fill="none" stroke="black"/>',
    ]
    for share in (0.0, 0.5, 1.0):
        y, x = top + tall - share * tall, left + share * inner
        parts.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{share * scale.tokens:,.0f}</text>')
        parts.append(
            f'<text x="{x:.0f}" y="{top + tall + 18}" text-anchor="middle">{share * scale.seconds:,.0f} s</text>'
        )
    for number, outcome in enumerate(outcomes):
        colour, y = _COLOURS[number % len(_COLOURS)], height - 20 + 20 * number
        points = " ".join(
            f"{left + second / scale.seconds * inner:.1f},{top + tall - tokens / scale.tokens * tall:.1f}"
            for second, tokens in curve(outcome)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<rect x="{left}" y="{y - 9}" width="20" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{left + 28}" y="{y - 3}">{escape(outcome.label)}</text>')
    return "\n".join([*parts, "</svg>", ""])
