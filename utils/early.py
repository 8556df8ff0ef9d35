"""Settings that work only before torch is imported. A script imports this module first.

Ctrl-C ends the process at once, without a traceback. Importing torch takes seconds. A
KeyboardInterrupt in the middle of the import prints forty lines. Some modules swallow it, and
others abort in C++. Nothing has begun yet, so there is nothing to clean up.
``signals.install_handlers`` takes over later.

PyTorch's C++ warnings are switched off. For each lost connection they print a stack of some thirty
lines. The exception says the same in one.

CPU threads that wait for others spin before they sleep. libgomp, which comes with PyTorch on Linux,
spins 300,000 times, for some milliseconds. This is fastest if each thread has a core to itself. If
other processes share the cores, a spinning thread occupies the core that the last thread needs.
Child processes inherit the variable. A user's own setting of either variable wins.
"""

import os
import signal

import utils.start  # noqa: F401  the clock

signal.signal(signal.SIGINT, signal.SIG_DFL)
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# A compromise, measured on two cores. Beside other training processes it is 1.6 to 2.5 times as
# fast as libgomp's default. Alone it is 2 to 5 % slower.
SPINS = "10000"
if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
    os.environ["GOMP_SPINCOUNT"] = SPINS
