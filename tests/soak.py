"""Kill random ranks at random moments, resume, and compare with an undisturbed run.

    python tests/soak.py --rounds 50

Not part of the test run. Each round trains from nothing, is killed (-9) some times on the way, is
resumed, and has to end in the weights and the metrics of a run that nobody touched.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import data
from tests.processes import finish, run, start
from tests.test_scripts import command, final_state
from tests.test_stop import ranks

LAYOUTS = [("single", 1), ("ddp", 2), ("ddp", 3), ("ddp", 4)]
HARD: list[Any] = ["--model", "basic", "--max-steps", 30, "--save-every-steps", 4, "--seed", 5]
HARD += ["--batch-size", 16, "--grad-accum-steps", 2, "--num-workers", 1, "--no-tensorboard"]


def arguments(
    technique: str, processes: int, folder: Path, data_dir: Path, *more: Any
) -> list[Any]:
    buckets = ["--bucket-cap-mb", 0.25] if technique == "ddp" else []
    where = ["--dataset", "synthetic", "--data-dir", data_dir, "--run-dir", folder]
    return command(technique, processes, *where, *HARD, *buckets, *more)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=50, help="kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    choose = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    data.prepare("synthetic", str(folder / "data"))
    calm: dict[tuple[str, int], Any] = {}
    kills = same = completions = 0
    while kills < options.rounds:
        layout = LAYOUTS[completions % len(LAYOUTS)]
        if layout not in calm:
            begin = time.monotonic()
            result = run(*arguments(*layout, folder / "calm", folder / "data"), timeout=300)
            assert result.returncode == 0, result.text
            calm[layout] = final_state(folder / "calm"), time.monotonic() - begin
            shutil.rmtree(folder / "calm")
        expected, seconds = calm[layout]
        hits = 0
        while True:
            process = start(*arguments(*layout, folder / "run", folder / "data", "--resume"))
            if hits < 3 and kills < options.rounds:
                time.sleep(choose.uniform(0.3, 0.9) * seconds)
                alive = ranks()
                if alive and process.poll() is None:
                    os.kill(choose.choice(list(alive.values())), signal.SIGKILL)
                    hits, kills = hits + 1, kills + 1
            result = finish(process, timeout=300)
            if result.returncode == 0:
                break
        equal = final_state(folder / "run") == expected
        completions, same = completions + 1, same + equal
        print(
            f"{layout[0]} on {layout[1]}: {hits} kills, {'same' if equal else 'DIFFERENT'};"
            f" {kills} kills in all, {same} of {completions} runs ended as if undisturbed",
            flush=True,
        )
        shutil.rmtree(folder / "run")
    shutil.rmtree(folder)
    return 0 if same == completions else 1


if __name__ == "__main__":
    sys.exit(main())
