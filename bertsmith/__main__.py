"""Entry point of ``python -m bertsmith``."""

from bertsmith.cli.main import main

main()
