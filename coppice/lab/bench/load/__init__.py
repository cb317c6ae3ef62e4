"""Load through the public API: closed loop, open loop and a step, under several speculation policies in turn."""
