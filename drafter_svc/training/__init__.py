"""Recipes for the drafters' checkpoints.

For `coppice.cli.train`; serving code never imports this package.
"""
