"""Draw a sheet of the synthetic digits, ten of each, as an SVG.

python scripts/tools/contact_sheet.py docs/synthetic_digits.svg
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from utils.datasets.digits import draw_digits
from utils.errors import UsageError, guard
from utils.files import replace_file

ROWS, SIDE, GAP = 5, 28, 2
LEVELS = (48, 112, 176)  # laid over each other: three greys are enough to judge the shapes


def sheet() -> str:
    """Return the SVG: a column for each digit, horizontal runs of pixels as strokes."""
    images, labels = draw_digits(1000, seed=1)
    paths: dict[int, list[str]] = {level: [] for level in LEVELS}
    for digit in range(10):
        for row, image in enumerate(images[labels == digit][:ROWS]):
            left, top = digit * (SIDE + GAP), row * (SIDE + GAP)
            for level in LEVELS:
                inside = torch.nn.functional.pad((image > level).int(), (1, 1))
                steps = inside.diff(dim=1)
                starts, ends = (steps == 1).nonzero().tolist(), (steps == -1).nonzero().tolist()
                for (y, x), (_, end) in zip(starts, ends, strict=True):
                    paths[level].append(f"M{left + x} {top + y + 0.5:g}h{end - x}")
    width, height = 10 * (SIDE + GAP) - GAP, ROWS * (SIDE + GAP) - GAP
    strokes = "\n".join(f'<path d="{"".join(runs)}"/>' for runs in paths.values())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-2 -2 {width + 4} {height + 4}"'
        f' width="{3 * width}">\n<rect x="-2" y="-2" width="{width + 4}" height="{height + 4}"/>\n'
        f'<g stroke="#fff" stroke-opacity=".5">\n{strokes}\n</g>\n</svg>\n'
    )


def run(output: Path) -> int:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        replace_file(output, sheet().encode())
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from error
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("output", type=Path)
    return guard(run, parser.parse_args().output)


if __name__ == "__main__":
    sys.exit(main())
