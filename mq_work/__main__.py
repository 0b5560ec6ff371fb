"""`python -m mq_work` is mq-work."""

import sys

from mq_work.cli import main

sys.exit(main())
