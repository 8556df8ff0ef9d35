"""Run the check again over the public scripts of docs/check.md, for whoever has the clones.

    python scripts/check/repeat.py CLONES

CLONES holds a folder OWNER+NAME for each repository of the table.
"""

import re
import subprocess
import sys
from pathlib import Path

TABLE = Path(__file__).resolve().parents[2] / "docs" / "check.md"
SCRIPT = Path(__file__).resolve().with_name("check.py")
CHECK = f"check() {{ '{sys.executable}' '{SCRIPT}' \"$@\"; }}"


def main() -> None:
    clones = Path(sys.argv[1])
    rows = re.findall(r"^\| \[(.*?)\].*?`(.*?)` \| (.*?) \|", TABLE.read_text(), re.M)
    for repository, command, published in rows:
        folder = clones / repository.replace("/", "+")
        print(f"{repository}: published {published}", flush=True)
        if not folder.is_dir():
            print(f"there is no {folder}\n")
            continue
        subprocess.run(["bash", "-c", f"{CHECK}\n{command}"], cwd=folder)
        print(flush=True)


if __name__ == "__main__":
    main()
