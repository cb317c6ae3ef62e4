"""EAGLE-3 drafters: one decoder layer on the target's hidden states, in the format of `speculators` checkpoints.

For `drafter_svc.drafters.registry`.
"""
