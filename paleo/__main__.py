"""``python -m paleo`` is ``paleo``."""

from paleo.cli import main

if __name__ == "__main__":
    main()
