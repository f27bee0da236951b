"""``python -m reshard`` is the command line."""

from reshard.cli.main import main

main()
