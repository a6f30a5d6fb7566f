"""The command line: each command parses its options, calls a public function and prints the answer.

A command is a file of ``paleo/cli/commands``, found by folder. Commands import what they need when they run, so that
``paleo --help`` stays fast. Exit codes: 0, 1 (the answer is no: it does not fit), 2 (wrong input), 3 (an error in this
program).
"""

from paleo.cli.process import app_with_all_commands as app_with_all_commands
from paleo.cli.process import main as main
from paleo.cli.process import run_command_line as run_command_line
