"""`mqfs serve` whose limits of HTTP are so low that a test may wait for them: these, or those of $HASTE in JSON.

python -m tests.http.hasty_server [ARGUMENT OF mqfs serve...]
"""

import json
import os
import sys

from mqfs.cli.main import main
from tests.support.temp_store import lowered

HASTE = {
    "HTTP_HEAD_S": 0.5,
    "HTTP_BODY_RATE": 1 << 20,
    "HTTP_IDLE_S": 1.0,
    "HTTP_SEND_S": 0.5,
    "HTTP_LINGER_S": 0.2,
    "HTTP_BEAT_S": 0.2,
    "NTFY_BEAT_S": 0.2,
    "HTTP_CONNECTIONS": 64,
    "HTTP_USER_CONNECTIONS": 12,
    "HTTP_USER_STREAMS": 3,
    "HTTP_USER_CLAIMS": 5,
    "HTTP_PAGE_BYTES": 4_096,
    "HTTP_METRIC_LINES": 20,
    "HTTP_FAILURES": 2,
    "HTTP_FAILURE_S": 0.5,
}

if __name__ == "__main__":
    with lowered(**json.loads(os.environ.get("HASTE", "null")) or HASTE):
        sys.argv = ["mqfs", "serve", *sys.argv[1:]]
        main()
