"""Draw a ring all-reduce chunk by chunk, as the lesson of it goes with four real ranks, as an SVG.

python scripts/tools/draw_ring.py docs/ring_all_reduce.svg
"""

import argparse
import faulthandler
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lessons"))

from _lesson import run_ranks
from ring_all_reduce import WORLD_SIZE, work
from svg import Drawing

from utils.config import OneLineParser
from utils.errors import UserError, guard

COLOURS = ("blue", "orange", "green", "red")  # of what each rank brings along
LEFT, TOP = 128, 64  # pixels
CELL, HEIGHT = 36, 26  # of a chunk
RANK = WORLD_SIZE * CELL + 40  # from one rank to the next
STEP = HEIGHT + 34
STUB = 22  # of an arrow that leaves on the right and comes in on the left


def history() -> list[list[list[int]]]:
    """Run the lesson; return after each step what the chunks of each rank are sums of.

    Returns:
        Numbers by step, rank and chunk, whose digit r, counted from the right, is 1 where the part
        of rank r is in the sum. The first step is the start.

    Raises:
        UserError: a rank failed.
    """
    outcomes = run_ranks(work, WORLD_SIZE)
    faulthandler.cancel_dump_traceback_later()  # the lesson's time limit
    for outcome in outcomes:
        if outcome.error:
            raise UserError(f"rank {outcome.rank} of the lesson failed: {outcome.error}")
    start = [[10**rank] * WORLD_SIZE for rank in range(WORLD_SIZE)]
    later = zip(*(outcome.value["history"] for outcome in outcomes), strict=True)
    return [start, *map(list, later)]


def draw(steps: list[list[list[int]]]) -> tuple[Drawing, float, float]:
    """Draw a row for each step; return the drawing, its width and its height."""
    drawing = Drawing()
    x = float(LEFT)
    for rank, colour in enumerate(COLOURS):
        drawing.box(x, 6, 12, 12, colour)
        drawing.text(x + 17, 16, f"from rank {rank}", "note")
        x += 100
    drawing.text(x, 16, "a chunk with all four is finished", "note")
    for rank in range(WORLD_SIZE):
        middle = LEFT + rank * RANK + WORLD_SIZE * CELL / 2
        drawing.text(middle, TOP - 14, f"rank {rank}", "title", "middle")
    for step, ranks in enumerate(steps):
        y = TOP + step * STEP
        if step:
            phase = "reduce-scatter" if step < WORLD_SIZE else "all-gather"
            drawing.text(LEFT - 24, y + 11, f"step {step}", "", "end")
            drawing.text(LEFT - 24, y + 25, phase, "note", "end")
        else:
            drawing.text(LEFT - 24, y + 17, "at first", "", "end")
        for rank, chunks in enumerate(ranks):
            for chunk, parts in enumerate(chunks):
                draw_chunk(drawing, LEFT + rank * RANK + chunk * CELL, y, parts)
                if step and steps[step - 1][rank][chunk] != parts:
                    draw_arrow(drawing, rank, chunk, y)
    return drawing, LEFT + WORLD_SIZE * RANK, TOP + len(steps) * STEP - 20


def draw_chunk(drawing: Drawing, x: float, y: float, parts: int) -> None:
    """Draw a chunk with a stripe for each rank whose part is in it."""
    width = (CELL - 4) / WORLD_SIZE
    for rank, colour in enumerate(COLOURS):
        if parts // 10**rank % 10:
            drawing.box(x + 2 + rank * width, y, width, HEIGHT, colour)
    drawing.box(x + 2, y, CELL - 4, HEIGHT)


def draw_arrow(drawing: Drawing, rank: int, chunk: int, y: float) -> None:
    """Draw the way of a chunk to ``rank`` from its neighbour on the left, or from the last rank."""
    x, above = LEFT + rank * RANK + (chunk + 0.5) * CELL, y - STEP + HEIGHT + 2
    if rank:
        drawing.line(x - RANK, above, x, y - 4, arrow=True)
    else:
        slope = (y - 4 - above) / RANK
        last = x + (WORLD_SIZE - 1) * RANK
        out = LEFT + WORLD_SIZE * RANK - STUB
        drawing.line(last, above, out, above + slope * (out - last))
        drawing.line(LEFT - STUB, y - 4 - slope * (x - LEFT + STUB), x, y - 4, arrow=True)


def run(args: argparse.Namespace) -> int:
    drawing, width, height = draw(history())
    title = f"A ring all-reduce of {WORLD_SIZE} ranks, chunk by chunk"
    origin = f"python scripts/tools/draw_ring.py {args.output}"
    drawing.save(args.output, width, height, title, origin)
    return 0


def main() -> int:
    parser = OneLineParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("output", type=Path, metavar="FILE.svg")
    return guard(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
