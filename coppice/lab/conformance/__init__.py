"""The lossless suite: what any running deployment must keep, proved over its public API.

It needs no torch and knows no service, but for `reference.py`, which compares with transformers.
"""
