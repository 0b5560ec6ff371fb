"""What a job of the tests does: a line in a file, with its number, when it ran and for which worker."""

from __future__ import annotations

import os
import time


def write(number: int) -> None:
    with open(os.environ["JOBS_DONE"], "ab", buffering=0) as file:
        file.write(f"{number} {time.time()} {os.getpgrp()}\n".encode())
