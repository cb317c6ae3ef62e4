"""One target on several devices (tensor parallel).

For `verifier_svc.model.loading` and `verifier_svc.app`.
"""
