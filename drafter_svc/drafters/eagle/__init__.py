"""EAGLE-3 drafters.

For `drafter_svc.drafters.registry`.
"""
