"""`mqfs serve` whose long work is done in pieces as short as can be: what takes one elsewhere takes many.

python -m tests.server.portioned_server [ARGUMENT OF mqfs serve...]
"""

import sys

from mqfs.cli.main import main
from tests.support.temp_store import lowered

if __name__ == "__main__":
    with lowered(LOOKING_S=0, PIECE_S=0):
        sys.argv = ["mqfs", "serve", *sys.argv[1:]]
        main()
