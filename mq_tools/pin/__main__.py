"""`python -m mq_tools.pin` is pin."""

import sys

from mq_tools.pin.cli import main

sys.exit(main())
