"""`mqfs serve` with other limits.

MQFS_LIMITS='NAME=NUMBER ...' python -m tests.server.lowered_server [ARGUMENT OF mqfs serve...]
"""

import os
import sys

from mqfs.cli.main import main
from tests.support.temp_store import lowered

if __name__ == "__main__":
    pairs = (pair.split("=") for pair in os.environ["MQFS_LIMITS"].split())
    with lowered(**{name: float(value) if "." in value else int(value) for name, value in pairs}):  # type: ignore[arg-type]
        sys.argv = ["mqfs", "serve", *sys.argv[1:]]
        main()
