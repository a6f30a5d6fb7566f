"""Runs the command line as ``python -m paleo``."""

import os


def main() -> None:
    """Run the ``paleo`` command line; an interrupt while its modules load ends with exit code 130, too."""
    try:
        from paleo.cli import main as run

        run()
    except KeyboardInterrupt:
        os._exit(130)


if __name__ == "__main__":
    main()
