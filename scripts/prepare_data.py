"""Get a data set and prepare it, so that training starts at once.

    python scripts/prepare_data.py mnist --data-dir data

Training does the same by itself; this is for a machine that will have no network later.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import data


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("dataset", choices=list(data.SOURCES))
    parser.add_argument("--data-dir", default="data")
    args = parser.parse_args()
    try:
        print(data.prepare(args.dataset, args.data_dir))
    except data.DataError as error:
        print(f"prepare_data.py: error: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
