"""The curves of the site, as SVG inside of a page, in the page's own colours."""

import html
import math

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 12, 40


def ticks(lowest: float, highest: float, about: int = 5) -> list[float]:
    """Round numbers between two others: multiples of 1, 2 or 5 times a power of ten."""
    rough = (highest - lowest) / about or 1.0
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [k * step for k in range(math.ceil(lowest / step), math.floor(highest / step + 1e-9) + 1)]


def loss_curve(losses: list[float], baseline: list[float] | None) -> str:
    """Losses against optimizer steps; the baseline's, if given, as a dashed line below."""
    every = losses + (baseline or [])
    lowest, highest = min(0.0, *every), max(every) * 1.02

    def x(step: int) -> float:
        return LEFT + (step - 1) / max(len(losses) - 1, 1) * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return TOP + (highest - loss) / (highest - lowest) * (HEIGHT - TOP - BOTTOM)

    def line(values: list[float], name: str) -> str:
        points = " ".join(f"{x(k):.1f},{y(loss):.1f}" for k, loss in enumerate(values[: len(losses)], start=1))
        return f'<polyline class="{name}" points="{points}"/>'

    rules = "".join(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>'
                    f'<text x="{LEFT - 8}" y="{y(t) + 4:.1f}" text-anchor="end">{t:g}</text>'
                    for t in ticks(lowest, highest))
    steps = [1, *(int(t) for t in ticks(1, len(losses)) if t > 1)]
    names = "".join(f'<text x="{x(t):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{t}</text>' for t in steps)
    title = html.escape(f"Loss of {len(losses)} optimizer steps, from {losses[0]:.4f} to {losses[-1]:.4f}")
    return (f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}"><title>{title}</title>'
            f'{rules}{names}<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">optimizer step</text>'
            f'{line(losses, "curve")}{line(baseline, "baseline") if baseline else ""}</svg>')
