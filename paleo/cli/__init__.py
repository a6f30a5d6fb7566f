"""The command line: parse, call, print.

A command is a file of ``paleo/cli/commands``, found by folder. Commands import what they need when they run, so that
``paleo --help`` stays quick. Exit codes: 0, 1 (the answer is no: it does not fit), 2 (bad input), 3 (a fault of ours).
"""

from paleo.cli.process import every_command as every_command
from paleo.cli.process import main as main
from paleo.cli.process import run as run
