"""Draw digits in the form of MNIST, for machines that cannot download the real set."""

import math
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

# Four ways of writing each digit, two in a line. A two-figure number is a control point "xy" on a
# 10 x 10 grid, where y grows downwards. A doubled point is a sharp corner, and "|" lifts the pen.
GLYPHS = Path(__file__).with_name("glyphs.txt").read_text()

SIDE = 28
CHUNK = 240  # a multiple of the 40 glyphs, small enough for the work to stay in the cache
POINTS = 96  # about one per pixel of the longest stroke, so that the dots fuse into a line
KNOTS = 9  # enough for the hand to stray several times within one digit

# Strength of the distortions, set so that a linear classifier stays near 91 % while a small
# convnet still learns nearly every digit in one epoch. Single figures are half the largest
# deviation, pairs the limits of a uniform choice. Without a unit they count in half heights of
# the digit (WOBBLE, BEND) or are slopes (TURN, SLANT, LEAN).
WOBBLE = 0.15
BEND = 0.11
TURN = 0.13
SLANT, LEAN = 0.28, 0.1  # LEAN is the mean slant: most hands lean to the right
ASPECT = (0.5, 1.05)  # width over height
SIZE = (16.0, 20.0)  # pixels, the longer side between line centres
SHIFT = 1.0  # pixels
RADIUS = (0.9, 1.9)  # pixels, half the width of the line
TAPER = 0.12  # share of the radius
EDGE = (0.8, 1.8)  # pixels over which the line fades out
BRIGHTNESS = (0.85, 1.0)  # share of 255


def _trace(stroke: str) -> list[complex]:
    """Sample the quadratic B-spline of one stroke, as x + iy in grid units."""
    controls = [complex(int(point[0]), int(point[1])) for point in stroke.split()]
    joints = [(a + b) / 2 for a, b in pairwise(controls[1:-1])]
    starts, ends = [controls[0], *joints], [*joints, controls[-1]]
    return [
        (1 - t) ** 2 * a + 2 * t * (1 - t) * b + t * t * c
        for a, b, c in zip(starts, controls[1:-1], ends, strict=True)
        for t in (i / 16 for i in range(17))
    ]


def _skeleton(glyph: str) -> list[complex]:
    """Space POINTS points evenly along the strokes of one glyph."""
    segments = [pair for stroke in glyph.split("|") for pair in pairwise(_trace(stroke))]
    spacing = sum(abs(b - a) for a, b in segments) / POINTS
    points: list[complex] = []
    walked = 0.0
    for a, b in segments:
        length = abs(b - a)
        while (target := (len(points) + 0.5) * spacing) < walked + length:
            points.append(a + (b - a) * ((target - walked) / length))
        walked += length
    return points


@cache
def _skeletons() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x and y in -1..1 [POINTS, glyphs], share of wobble and digit (uint8) [glyphs]."""
    lines = GLYPHS.splitlines()
    named = [(int(line[0]), glyph) for line in lines for glyph in line[2:].split(",")]
    digits = torch.tensor([digit for digit, _ in named], dtype=torch.uint8)
    glyphs = [_skeleton(glyph) for _, glyph in named]
    xy = torch.tensor([[(p.real, p.imag) for p in points] for points in glyphs]) / 4.5 - 1
    lengths = [sum(abs(b - a) for a, b in pairwise(points)) for points in glyphs]
    # The hand has no time to stray on a short line. Below about two grid heights the wobble shrinks
    # with the length, so that a "1" stays straight.
    sways = torch.tensor(lengths).div(20).clamp(max=1)
    return xy[..., 0].T, xy[..., 1].T, sways, digits


def _draw_chunk(seed: int) -> tuple[Tensor, Tensor]:
    """Return images uint8 [CHUNK, SIDE, SIDE] and labels uint8 [CHUNK]."""
    # Only elementwise arithmetic, roots, minima and maxima are used here. They give the same bits
    # everywhere, unlike matrix products, sines or normal deviates.
    generator = torch.Generator().manual_seed(seed)

    def between(low: float, high: float, rows: int = 1) -> Tensor:
        return torch.rand(rows, CHUNK, generator=generator) * (high - low) + low

    def around_zero(spread: float, rows: int = 1) -> Tensor:
        # The sum of two uniform numbers keeps the extremes rare, as in real handwriting.
        return between(-spread, spread, rows) + between(-spread, spread, rows)

    def along_stroke(spread: float) -> Tensor:
        """Let a value drift smoothly (quadratic B-spline) along the pen's way, [POINTS, CHUNK]."""
        knots = around_zero(spread, KNOTS)
        place = torch.arange(POINTS) * ((KNOTS - 2) / POINTS)
        knot = place.long()
        t = (place - knot)[:, None]
        a, b, c = (1 - t) * (1 - t) / 2, 0.5 + t - t * t, t * t / 2
        return a * knots[knot] + b * knots[knot + 1] + c * knots[knot + 2]

    def bend() -> Tensor:
        a, b, c = around_zero(BEND, 3)
        return a * x * x + b * x * y + c * y * y

    xs, ys, sways, digits = _skeletons()
    glyph = between(0, 1)[0].argsort(stable=True) % len(digits)
    sway = sways[glyph]
    x = xs[:, glyph] + sway * along_stroke(WOBBLE)
    y = ys[:, glyph] + sway * along_stroke(WOBBLE)
    x, y = x + bend(), y + bend()
    x = x * between(*ASPECT) - y * (around_zero(SLANT) + LEAN)
    turn = around_zero(TURN)
    x, y = x - turn * y, y + turn * x

    # As in MNIST the digit is finally fitted to a box about the centre.
    x, y = x - (x.amin(0) + x.amax(0)) / 2, y - (y.amin(0) + y.amax(0)) / 2
    zoom = between(*SIZE) / (2 * torch.maximum(x.amax(0), y.amax(0)))
    centre = (SIDE - 1) / 2
    x, y = x * zoom + around_zero(SHIFT) + centre, y * zoom + around_zero(SHIFT) + centre

    # Distances are measured in local radii of the line, so that a line can grow thinner.
    radius = between(*RADIUS)
    unit = (radius * (1 + along_stroke(TAPER)))[:, None]
    pixels = torch.arange(SIDE)[None, :, None]
    dx2, dy2 = (((pixels - axis[:, None]) / unit).square() for axis in (x, y))
    nearest = torch.full((SIDE, SIDE, CHUNK), float("inf"))
    distance = torch.empty_like(nearest)
    for p in range(POINTS):
        torch.add(dx2[p, None], dy2[p, :, None], out=distance)
        torch.minimum(nearest, distance, out=nearest)
    ink = ((1 - nearest.sqrt()) * (radius / between(*EDGE)) + 0.5).clamp(0, 1)
    images = (ink * (between(*BRIGHTNESS) * 255)).round().to(torch.uint8)
    return images.permute(2, 0, 1), digits[glyph]


def draw_digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images uint8 [count, 28, 28] and labels uint8 [count], the same for the same seed."""
    threads = torch.get_num_threads()
    # One core needs two seconds for 70,000 digits. With more threads, each of these short
    # operations ends in a barrier, which can cost minutes on a busy machine.
    torch.set_num_threads(1)
    try:
        first = seed * 1_000_000  # so that no two sets share a chunk
        chunks = [_draw_chunk(first + i) for i in range(math.ceil(count / CHUNK))]
    finally:
        torch.set_num_threads(threads)
    images, labels = zip(*chunks, strict=True)
    return torch.cat(images)[:count], torch.cat(labels)[:count]
