"""`mqfs serve` with small segments, so that seconds of writing see many of them rolled.

python -m tests.server.small_server [ARGUMENT OF mqfs serve...]
"""

import sys

from mqfs.cli.main import main
from tests.support.temp_store import SMALL, lowered

if __name__ == "__main__":
    with lowered(**{**SMALL, "SEQUENCE_BLOCK": 256, "SEGMENT_BYTES": 16_384, "SEGMENT_RECORDS": 400}):
        sys.argv = ["mqfs", "serve", *sys.argv[1:]]
        main()
