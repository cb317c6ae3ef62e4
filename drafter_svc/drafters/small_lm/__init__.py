"""The small LM drafter: a best-first tree, in a few batched steps of a small model, or a drawn one.

For `drafter_svc.drafters.registry`.
"""
