"""Re-drafting in the same pass (SPACE): mask rows behind a tree draft the next one.

For `verifier_svc.engine`.
"""
