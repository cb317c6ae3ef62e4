"""The kinds of drafters, a folder each; `base` is their contract, `kinds` their list, `registry` loads one.

For `drafter_svc.session` and `drafter_svc.app`.
"""
