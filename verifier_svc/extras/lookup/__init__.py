"""Prompt lookup: drafts from a request's own text, made where its tokens are chosen.

For `verifier_svc.engine` and `verifier_svc.model`.
"""
