"""`coppice adapt`: makes drafters for any target, from text that the target writes itself.

Uses the verifier's engine and the drafters' training; only `coppice.cli` uses this package.
"""
