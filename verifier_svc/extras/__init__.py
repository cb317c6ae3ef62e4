"""Optional stages of a pass: in-pass re-drafting and early pruning. Both need trained weights besides the target's.

For `verifier_svc.engine` and `verifier_svc.model`.
"""
