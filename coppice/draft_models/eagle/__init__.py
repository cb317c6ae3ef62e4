"""EAGLE-3 heads: one decoder layer on the target's hidden states, in the format of `speculators` checkpoints.

For `drafter_svc.drafters.eagle` and `verifier_svc.extras.head`.
"""
