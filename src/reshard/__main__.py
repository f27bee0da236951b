"""``python -m reshard``, and what the installed command starts."""


def main() -> None:
    """The command line. Ctrl-C ends it quietly from here on, while it is imported too."""
    from reshard.cli.signals import leave_when_interrupted

    leave_when_interrupted()
    from reshard.cli.main import main

    main()


if __name__ == "__main__":
    main()
