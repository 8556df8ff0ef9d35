"""Get a data set and prepare it, so that training starts at once.

    python scripts/tools/prepare_data.py mnist --data-dir data

Training does the same by itself. Use this tool for a machine that will have no network later.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import data
from utils import output
from utils.datasets.prepare import prepare
from utils.datasets.sources import SOURCES
from utils.errors import guard
from utils.training import config


def run(args: argparse.Namespace) -> int:
    data.load_dataset(args.dataset, args.data_dir)  # reads and verifies what is there
    print(prepare(args.dataset, args.data_dir))
    return 0


def main() -> int:
    output.protect()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("dataset", choices=list(SOURCES))
    parser.add_argument("--data-dir", type=config.PATH, default="data")
    return guard(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
