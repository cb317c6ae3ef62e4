"""Loops and products of our own, a folder per platform.

`cpu` is used by the services and by `coppice.core` and `coppice.search`; readers who serve on GPUs never need it.
"""
