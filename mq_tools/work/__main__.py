"""`python -m mq_tools.work` is mq-work."""

import sys

from mq_tools.work.cli import main

sys.exit(main())
