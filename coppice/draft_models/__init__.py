"""Draft models that run in the caller's process: compiled passes and searches, coupling to noise, EAGLE heads.

For `drafter_svc` and `verifier_svc.extras`.
"""
