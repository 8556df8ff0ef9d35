"""Run the check again over the public scripts of docs/check.md, for whoever has the clones.

    python scripts/check/repeat.py CLONES

CLONES holds a folder OWNER+NAME for each repository of the table.
"""

import shlex
import sys
from pathlib import Path

from check import Ranks

TABLE = Path(__file__).resolve().parents[2] / "docs" / "check.md"


def main() -> None:
    clones = Path(sys.argv[1])
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| [")]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines]
    with Ranks() as ranks:
        for repository, _, command, published, _ in rows:
            owner, name = repository.split("](")[0].strip("[").split("/")
            folder = clones / f"{owner}+{name}"
            script, *arguments = shlex.split(command.strip("`"))
            place = folder / script
            if not place.is_file():
                print(f"{owner}/{name}: there is no {place}")
                continue
            found = ranks.check(place, arguments, folder=place.parent, limit=90)
            print(f"{owner}/{name}: published {published}\n{found}\n", flush=True)


if __name__ == "__main__":
    main()
