"""Measure what a larger global batch costs in accuracy, by the rule that scales the learning rate.

    python scripts/tools/large_batch.py --output runs/large_batch.json
    python scripts/tools/large_batch.py --output runs/large_batch.json --rules all --chart FILE.svg
    python scripts/tools/large_batch.py --batch-sizes 1536 --epochs 1 --seeds 0 -- --momentum 0.8

Runs train_single.py at each global batch: on one device, since the rank of a sample changes nothing
about it. Each run is added to the file as soon as it ends, and one that is there is not repeated:
after Ctrl-C the same command goes on. Then it prints the mean test accuracy of the seeds. The rules
none, sqrt and linear are run without clipping, as in their papers. A run that diverges, of which
nothing is evaluated, counts as 10 %, which is guessing. What stands after -- goes to the script.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import trial
from svg import Drawing

import data
from utils import config
from utils.errors import UsageError, guard
from utils.files import write_json
from utils.optim import RULES

DEFAULT = RULES[0]
COLOURS = dict(zip(RULES, ("green", "orange", "blue", "grey"), strict=True))
Key = tuple[str, int, float, int]  # rule, global batch, epochs, seed
GUESSING = 0.1  # what a run counts for that diverged: its weights are not saved, nor evaluated
Found = dict[Key, float]  # test accuracy, 0 to 1
LEFT, TOP, WIDTH, HEIGHT, GAP = 60, 64, 300, 240, 40  # of a panel of the chart, in pixels
TICKS = (0.0, 0.5, 0.9, 0.95, 0.98, 0.99, 0.995)
LOWEST_ERROR = 0.0035


def list_of(kind: Any) -> Any:
    def parse(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",") if part]

    return parse


def rules(text: str) -> list[str]:
    names = list(RULES) if text == "all" else text.split(",")
    if unknown := set(names) - set(RULES):
        raise argparse.ArgumentTypeError(f"{unknown.pop()!r} is none of {', '.join(RULES)}, all")
    return names


def parse_args(argv: list[str]) -> argparse.Namespace:
    end = argv.index("--") if "--" in argv else len(argv)
    parser = config.OneLineParser(
        prog="large_batch.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    sizes = [96, 384, 768, 1536, 3072, 6144]
    parser.add_argument("--batch-sizes", type=list_of(config.SIZE), default=sizes, help="global")
    parser.add_argument("--epochs", type=list_of(config.POSITIVE), default=[1, 5], help="1,5")
    parser.add_argument("--seeds", type=list_of(config.COUNT), default=[0, 1, 2], help="0,1,2")
    parser.add_argument("--rules", type=rules, default=[DEFAULT], help=f"{DEFAULT}; or all")
    parser.add_argument("--dataset", choices=list(data.SOURCES), default="mnist")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--threads", type=config.SIZE, help="of a run (default: all cores)")
    parser.add_argument("--time-limit", type=config.POSITIVE, default=3600.0, help="of a run")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="keep the runs here")
    parser.add_argument("--chart", type=Path, metavar="FILE.svg")
    args = parser.parse_args(argv[:end])
    args.flags = argv[end + 1 :]
    return args


def plan(args: argparse.Namespace) -> list[Key]:
    """Return the runs to make, the quick ones and one of each first."""
    return [
        (rule, batch_size, epochs, seed)
        for epochs in args.epochs
        for seed in args.seeds
        for rule in args.rules
        for batch_size in args.batch_sizes
    ]


def command(key: Key, args: argparse.Namespace) -> list[Any]:
    rule, batch_size, epochs, seed = key
    words = ["--dataset", args.dataset, "--data-dir", args.data_dir, "--batch-size", batch_size]
    words += ["--epochs", f"{epochs:g}", "--seed", seed, "--lr-scaling", rule]
    words += ["--max-grad-norm", 0] if rule != DEFAULT else []
    words += ["--threads", args.threads] if args.threads else []
    return [sys.executable, trial.ROOT / "train_single.py", *words, *args.flags]


def measure(args: argparse.Namespace, found: Found) -> None:
    """Make the runs that are not in ``found`` yet; one that diverges counts as guessing.

    Raises:
        TrialError: a run failed for another reason.
    """
    left = [key for key in plan(args) if key not in found]
    for key in tqdm(left, disable=None, dynamic_ncols=True, leave=False):
        try:
            outcome = trial.train(command(key, args), args.time_limit)
            found[key] = outcome.summary["test_accuracy"]
        except trial.TrialError as error:
            if "the loss is nan" not in str(error) and "not finite" not in str(error):
                raise
            found[key] = GUESSING
        if args.output:
            rows = [[*key, accuracy] for key, accuracy in found.items()]
            args.output.parent.mkdir(parents=True, exist_ok=True)
            write_json(args.output, {"flags": args.flags, "runs": rows})


def read(args: argparse.Namespace) -> Found:
    """Return the runs that the file holds.

    Raises:
        UsageError: it is of other flags, or no file of this tool.
    """
    if not args.output or not args.output.exists():
        return {}
    try:
        content = json.loads(args.output.read_text())
        found = {(r, b, e, s): accuracy for r, b, e, s, accuracy in content["runs"]}
        flags = content["flags"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{args.output} holds no runs of this tool: {error}") from None
    if flags != args.flags:
        raise UsageError(f"{args.output} holds runs with other flags ({' '.join(flags) or 'none'})")
    return found


def of_seeds(found: Found, rule: str, batch_size: int, epochs: float) -> list[float]:
    return [a for (r, b, e, _), a in found.items() if (r, b, e) == (rule, batch_size, epochs)]


def table(found: Found) -> str:
    """Return mean, range and number of seeds, a row for each rule and length of training."""
    sizes = sorted({key[1] for key in found})
    lines = ["global batch            " + "".join(f"{size:>9,}" for size in sizes)]
    for epochs in sorted({key[2] for key in found}):
        for rule in [rule for rule in RULES if any(k[0] == rule and k[2] == epochs for k in found)]:
            values = [of_seeds(found, rule, size, epochs) for size in sizes]
            means = [f"{statistics.mean(v):.2%}" if v else "-" for v in values]
            ends = [f"+-{(max(v) - min(v)) / 2:.2%}" if len(v) > 1 else "" for v in values]
            name = f"{rule}, {epochs:g} epoch{'s' if epochs != 1 else ''}"
            lines.append(f"{name:24}" + "".join(f"{mean:>9}" for mean in means))
            lines.append(f"{'':24}" + "".join(f"{end:>9}" for end in ends))
    return "\n".join(line.rstrip() for line in lines if line.strip())


def height_of(accuracy: float) -> float:
    """Return where an accuracy lies in a panel: the error is logarithmic, from 100 % on."""
    error = max(1 - accuracy, LOWEST_ERROR)
    return TOP + HEIGHT * (1 - math.log(error) / math.log(LOWEST_ERROR))


def draw(found: Found) -> tuple[Drawing, float, float]:
    """Draw a panel for each length of training; return the drawing, its width and its height."""
    drawing, x = Drawing(), LEFT
    sizes = sorted({key[1] for key in found})
    for epochs in sorted({key[2] for key in found}):
        title = f"{epochs:g} epoch{'s' if epochs != 1 else ''}"
        drawing.text(x + WIDTH / 2, TOP - 12, title, "title", "middle")
        draw_panel(drawing, x, sizes, found, epochs)
        x += WIDTH + GAP
    shown = [rule for rule in RULES if any(key[0] == rule for key in found)]
    for i, rule in enumerate(shown):
        drawing.line(LEFT + 140 * i, 20, LEFT + 140 * i + 24, 20, colour=COLOURS[rule])
        drawing.text(LEFT + 140 * i + 30, 24, rule)
    for accuracy in TICKS:
        drawing.text(LEFT - 8, height_of(accuracy) + 4, f"{100 * accuracy:g} %", "note", "end")
    drawing.text(LEFT, TOP + HEIGHT + 38, "global batch, images; test accuracy", "note")
    return drawing, x, TOP + HEIGHT + 50


def draw_panel(drawing: Drawing, x: int, sizes: list[int], found: Found, epochs: float) -> None:
    def place(size: int) -> float:
        span = math.log(sizes[-1] / sizes[0]) or 1.0
        return x + 16 + (WIDTH - 32) * math.log(size / sizes[0]) / span

    drawing.box(x, TOP, WIDTH, HEIGHT)
    for accuracy in TICKS[1:]:
        drawing.line(x, height_of(accuracy), x + 4, height_of(accuracy))
    for size in sizes:
        drawing.text(place(size), TOP + HEIGHT + 16, f"{size:,}", "note", "middle")
    for rule in reversed(RULES):  # the default on top of the others
        last: tuple[float, float] | None = None
        for size in sizes:
            values = of_seeds(found, rule, size, epochs)
            if not values:
                continue
            point = place(size), height_of(statistics.mean(values))
            if last:
                drawing.line(*last, *point, colour=COLOURS[rule])
            drawing.box(point[0] - 3, point[1] - 3, 6, 6, COLOURS[rule])
            last = point


def run(args: argparse.Namespace) -> int:
    found = read(args)
    try:
        measure(args, found)
    except KeyboardInterrupt:
        print("interrupted: these are the runs that were complete", file=sys.stderr)
    if found:
        print(table(found))
    if args.chart and found:
        drawing, width, height = draw(found)
        seeds = len({key[3] for key in found})
        title = f"Test accuracy against the global batch, mean of up to {seeds} seeds"
        origin = "python scripts/tools/large_batch.py " + " ".join(sys.argv[1:])
        drawing.save(args.chart, width, height, title, origin)
    return 0


def main() -> int:
    trial.raise_on_sigterm()
    return guard(run, parse_args(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
