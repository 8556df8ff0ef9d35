"""Run the check again over the public scripts of public_scripts.md.

    python scripts/check/repeat.py CLONES

CLONES holds a folder OWNER+NAME for each repository of the table.
"""

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TABLE = HERE.joinpath("public_scripts.md").read_text()
CHECK = f"check() {{ '{sys.executable}' '{HERE}/check.py' \"$@\"; }}"
ROW = re.compile(r"^\| \[(.*?)\].*?`(.*?)` \| (.*?) \|", re.M)

for repository, command, published in ROW.findall(TABLE):
    print(f"\n{repository}: published {published}", flush=True)
    folder = Path(sys.argv[1], repository.replace("/", "+"))
    if folder.is_dir():
        subprocess.run(["bash", "-c", f"{CHECK}\n{command}"], cwd=folder)
    else:
        print(f"there is no {folder}")
