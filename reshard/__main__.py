"""``python -m reshard``, and what the installed command starts."""

import sys


def main() -> None:
    """The command line. Ctrl-C ends it quietly from here on, while it is imported too."""
    from reshard.cli.signals import leave_when_interrupted

    leave_when_interrupted()
    try:
        from reshard.cli.main import main
    except ModuleNotFoundError as error:
        from reshard.core.extras import lacking

        sys.exit(f"Error: {lacking(error) or error}")
    main()


if __name__ == "__main__":
    main()
