"""`mqfs serve` with a bug: a function of ours raises once each time that a file `bug` is put into its folder.

MQFS_BUG=module:Class.function python -m tests.server.faulty_server [ARGUMENT OF mqfs serve...]
"""

import contextlib
import functools
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from mqfs.cli.main import main


def make_faulty(what: str) -> None:
    module, _, name = what.partition(":")
    owner, _, function = name.rpartition(".")
    place: Any = importlib.import_module(module)
    for word in filter(None, owner.split(".")):
        place = getattr(place, word)
    sound = getattr(place, function)

    @functools.wraps(sound)
    def faulty(*arguments: Any, **more: Any) -> Any:
        with contextlib.suppress(FileNotFoundError):
            Path("bug").unlink()
            raise ZeroDivisionError(f"the bug in {name}")
        return sound(*arguments, **more)

    setattr(place, function, faulty)


if __name__ == "__main__":
    make_faulty(os.environ["MQFS_BUG"])
    sys.argv = ["mqfs", "serve", *sys.argv[1:]]
    main()
