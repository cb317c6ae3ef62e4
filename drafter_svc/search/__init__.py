"""Search for drafts: coupling to the request's noise, drafting ahead, joint passes.

For `drafter_svc.drafters` and `drafter_svc.session`.
"""
