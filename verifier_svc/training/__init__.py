"""Training recipes of the target, re-draft adapters and early heads.

For `coppice.cli.train`; serving code never imports this package.
"""
