"""Runs the command line as ``python -m paleo``."""

import os


def main() -> None:
    """Run the command line; an interrupt while it is being loaded is handled like any other."""
    try:
        from paleo.cli import main as run

        run()
    except KeyboardInterrupt:
        os._exit(130)


if __name__ == "__main__":
    main()
