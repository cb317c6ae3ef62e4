"""Early pruning (ProPD): nodes that an early head finds unlikely leave the pass.

For `verifier_svc.engine` and `verifier_svc.model`.
"""
