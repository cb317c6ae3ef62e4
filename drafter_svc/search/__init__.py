"""Search for drafts: drafting ahead, joint passes.

For `drafter_svc.drafters` and `drafter_svc.session`.
"""
