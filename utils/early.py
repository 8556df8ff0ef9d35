"""Settings that count only if they are made before torch is imported. A script imports this first.

Ctrl-C ends the process at once, without a traceback. Importing torch takes seconds, and Python's
KeyboardInterrupt in the middle of it prints forty lines, is swallowed by some modules, and aborts
in C++ in others. Nothing has begun yet, so there is nothing to clean up.
``signals.install_handlers`` takes over later.

PyTorch's C++ warnings are switched off. For each lost connection they print a stack of some thirty
lines, and the exception says the same.

CPU threads that wait for others spin before they sleep. libgomp, which PyTorch brings along on
Linux, spins 300,000 times, some milliseconds. That is fastest if each thread has a core to itself.
If other processes share the cores, a spinning thread holds up the one that all wait for. The
variable is inherited by child processes. A user's own setting of either variable wins.
"""

import os
import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# A compromise measured on two cores: beside other training processes 1.6 to 2.3 times as fast as
# libgomp's default, alone 1 to 5 % slower. The table is in docs/tools.md.
SPINS = "10000"
if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
    os.environ["GOMP_SPINCOUNT"] = SPINS
