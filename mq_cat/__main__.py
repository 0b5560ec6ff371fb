"""`python -m mq_cat` is mq-cat."""

import sys

from mq_tools.entry import mq_cat

sys.exit(mq_cat())
