"""Drafters on the target's hidden states: heads that correct a semi-autoregressive drafter.

For `drafter_svc.drafters.registry`; `drafter_svc.drafters.block` takes the heads.
"""
