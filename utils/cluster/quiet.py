"""Be quiet from the first moment: a script imports this first, before torch.

Ctrl-C ends the process at once, without a traceback. Importing torch takes seconds. Python would
raise KeyboardInterrupt somewhere in there, which gives forty lines, is swallowed by some modules,
and aborts in C++ in others. The kernel's own way of ending a process leaves nothing to clean up:
nothing has begun. ``signals.install_handlers`` takes over from here.

PyTorch's C++ keeps its warnings to itself: of each connection that is lost it tells with the stack,
some thirty lines, beside the exception that says the same. It reads the variable when it is loaded.
"""

import os
import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
