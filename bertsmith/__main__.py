"""``python -m bertsmith``, the same as the command ``bertsmith``. It never knows the verbs."""

from bertsmith.cli.main import main

main()
