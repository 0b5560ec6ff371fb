"""`python -m mq_tool` is mq."""

import sys

from mq_tool.cli import main

sys.exit(main())
