"""Start the check by the name of its folder: ``python scripts/check train.py``."""

import sys

from check import main

sys.exit(main())
