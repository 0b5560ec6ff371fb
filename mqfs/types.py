"""What model.py, wait.py and seams.py hold, by the name that it had in version 0.1; to go with the next."""

from mqfs.model import *  # noqa: F403
from mqfs.seams import *  # noqa: F403
from mqfs.wait import *  # noqa: F403
