"""How long a CPU thread that waits for others spins before it sleeps: imported before torch.

At the end of every operation the threads of a process wait for the last of them, and OpenMP lets
them spin meanwhile: libgomp, which PyTorch brings along on Linux, 300,000 times, some milliseconds.
That is the fastest where each has a core to itself. Where others use the cores, too, it keeps the
thread that all wait for from the core that it needs: two trainings side by side then get far less
than a half each. libgomp reads the variable when it is loaded; other OpenMP libraries ignore it.
The processes that this one starts inherit it. A user's own setting, of either variable, counts.
"""

import os

# A compromise that scripts/tools/waiting.py measured on two cores: beside other trainings 1.6 to
# 2.3 times as fast as libgomp's default, alone 1 to 5 % slower. The table is in docs/tools.md.
SPINS = "10000"

if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
    os.environ["GOMP_SPINCOUNT"] = SPINS
