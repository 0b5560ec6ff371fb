"""`python -m mq_tools.work` is mq-work."""

import sys

from mq_tools.entry import mq_work

sys.exit(mq_work())
