"""`python -m pin` is pin."""

import sys

from pin.cli import main

sys.exit(main())
