"""Drafters of a block of tokens in one pass or a few: semi-autoregressive masks and masked diffusion.

For `drafter_svc.drafters.registry`; `block_lm` is the base of further kinds.
"""
