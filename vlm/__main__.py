"""`python -m vlm` is the command `vlm`."""

from vlm.cli.main import main

main()
