"""``python -m bertsmith``, the same as the command ``bertsmith``."""

from bertsmith.cli.app import main

main()
