"""`coppice bench ablation`: what each drafter, shape of tree, way to choose children or part of a pass is worth.

`drafters` and `in_pass` declare groups of variants, rows and ratios; `groups` serves both.
"""
