"""``python -m outlast_worker`` is the command `outlast`."""

from outlast_worker.cli import main

main()
