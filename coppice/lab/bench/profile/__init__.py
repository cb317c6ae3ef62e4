"""The profile of a machine for the simulator, measured on the real services through their contracts."""
