"""The `coppice` command: one module per sub-command, heavy imports inside the commands that need them."""
