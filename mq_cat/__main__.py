"""`python -m mq_cat` is mq-cat."""

import sys

from mq_cat.cli import main

sys.exit(main())
