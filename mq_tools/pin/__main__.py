"""`python -m mq_tools.pin` is pin."""

import sys

from mq_tools.entry import pin

sys.exit(pin())
