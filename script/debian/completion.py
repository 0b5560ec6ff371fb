"""Print the completion script of a program: `completion.py SHELL PROGRAM VENV`, with the packages of VENV."""

import glob
import sys

shell, program, venv = sys.argv[1:]
sys.path[:0] = glob.glob(f"{venv}/lib/python3*/site-packages")

from mq_tools.completion import script  # noqa: E402

print(script(shell, program))
