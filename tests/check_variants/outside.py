"""A script that writes outside of its folder, reads it again, and then waits for nobody."""

import shutil
import sys
import time
from pathlib import Path

other = Path(sys.argv[1])
(other / "new").mkdir(exist_ok=True)
(other / "new/y").write_text("2")
assert (other / "new/y").read_text() == "2"
with (other / "logs/x").open("a") as file:
    file.write("3")
assert (other / "logs/x").read_text() == "13"
(other / "logs/z").write_text("")
assert {path.resolve().name for path in (other / "logs").iterdir()} == {"x", "z", "w"}
(other / "logs/w").write_text("")
shutil.rmtree(other / "logs")
while True:
    time.sleep(5)
