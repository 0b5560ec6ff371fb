"""`mqfs serve` whose limits of fq are so low that a test may wait for them.

python -m tests.fq.hasty_server [ARGUMENT OF mqfs serve...]
"""

import sys

from mqfs.cli.main import main
from tests.support.temp_store import lowered

HASTE = {"FQ_AUTH_S": 0.3, "FQ_AWAY_S": 0.3, "FQ_PART_S": 0.2}

if __name__ == "__main__":
    with lowered(**HASTE):
        sys.argv = ["mqfs", "serve", *sys.argv[1:]]
        main()
