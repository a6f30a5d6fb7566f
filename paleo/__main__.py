"""``python -m paleo`` is ``paleo``."""

import os


def main() -> None:
    """Run the command line; an interrupt while it is loaded is answered as any other."""
    try:
        from paleo.cli import main as run

        run()
    except KeyboardInterrupt:
        os._exit(130)


if __name__ == "__main__":
    main()
