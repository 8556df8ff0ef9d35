"""When this process began, as well as it knows: importing this changes nothing."""

import time

STARTED = time.perf_counter()
