"""Small LM drafter: best-first trees in a few batched steps of a small model, or sampled trees.

For `drafter_svc.drafters.registry`.
"""
