"""From rows of logits to accepted tokens: token choice, acceptance, traversal, stops.

For `verifier_svc.engine`.
"""
