"""Accepted tokens from rows of logits: token choice, acceptance, traversal, stops.

For `verifier_svc.engine`.
"""
