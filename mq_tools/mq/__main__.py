"""`python -m mq_tools.mq` is mq."""

import sys

from mq_tools.mq.cli import main

sys.exit(main())
