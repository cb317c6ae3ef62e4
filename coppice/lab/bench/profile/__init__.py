"""What the simulator needs to know of a machine, measured on the real services through their contracts."""
