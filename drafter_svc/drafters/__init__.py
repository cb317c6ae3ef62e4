"""Kinds of drafters, one folder each; `base` has their interface, `kinds` the list, `registry` loads one.

For `drafter_svc.session` and `drafter_svc.app`.
"""
