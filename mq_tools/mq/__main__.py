"""`python -m mq_tools.mq` is mq."""

import sys

from mq_tools.entry import mq

sys.exit(mq())
