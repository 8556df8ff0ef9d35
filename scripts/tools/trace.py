"""Tell where the time of a step went, from the traces that --profile left in a run directory.

    python scripts/tools/trace.py runs/ddp-20260101-120000
    python scripts/tools/trace.py --draw steps.svg runs/profiled/{single,dp,ddp}

Prints the share of each phase in the profiled steps of rank 0, and how long each rank of a host
waited for the slowest, and writes them to profile.json in the run directory. With --draw, one step
of each run is drawn, one above the other to one scale.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import timeline
from phases import TraceError, analyse, read_ranks, waits

from utils.config import OneLineParser
from utils.errors import guard
from utils.files import write_json


def describe(result: dict[str, Any]) -> str:
    """Return the shares as a table for the console."""
    notes = {}
    if result["communication_parts"]:
        parts = result["communication_parts"].items()
        notes["communication"] = ", ".join(f"{p.replace('_', ' ')} {s:.1%}" for p, s in parts)
        hidden = result["communication_total"] - result["shares"]["communication"]
        if hidden >= 0.0005:
            notes["communication"] += f"; hidden {hidden:.1%} more"
    if "replica_threads" in result:
        count, at_once = result["replica_threads"].values()
        notes["forward"] = f"{at_once:.1f} of {count} threads at once"
    lines = [
        f"profile of {result['steps']} steps, {result['step_seconds'] * 1e3:.2f} ms each, on the"
        f" {result['timeline']}:"
    ]
    for name, share in result["shares"].items():
        lines.append(f"  {name:<13} {share:>6.1%}  {notes.get(name, '')}".rstrip())
    if len(result["waits"]) > 1:
        told = (f"rank {rank} {share:.1%}" for rank, share in enumerate(result["waits"]))
        lines.append(f"  waiting, in backward, for the slowest rank: {', '.join(told)}")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    for run_dir in args.run_dirs:
        result = analyse(run_dir) | {"waits": []}
        try:
            result["waits"] = waits(read_ranks(run_dir))
        except TraceError as error:  # of another rank, which may have been killed
            print(f"warning: {error}", file=sys.stderr)
        print(f"{run_dir}: {describe(result)}")
        print(f"  traces for ui.perfetto.dev: {run_dir / 'profile'}")
        try:
            write_json(run_dir / "profile.json", result)
        except OSError as error:
            raise TraceError(f"cannot write {run_dir / 'profile.json'}: {error}") from error
    if args.draw:
        panels = [timeline.read_panel(run_dir, read_ranks(run_dir)) for run_dir in args.run_dirs]
        timeline.draw(panels, args.draw, args.note)
        print(f"one step of each is drawn in {args.draw}")
    return 0


def main() -> int:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--draw", type=Path, metavar="FILE.svg", help="draw one step of each run")
    parser.add_argument("--note", default="", help="what the drawing is to say of how it was made")
    return guard(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
