"""In-pass re-drafting (SPACE): mask rows after tree nodes draft for the next round.

For `verifier_svc.engine`.
"""
