"""The lossless suite: what any running deployment must keep, proved over its public API.

It stands beside `coppice/lab/bench/` and not in `coppice/`, because it may compare with transformers (`reference.py`), which
shared code must not know. Everything else here needs no torch and knows no service.
"""
