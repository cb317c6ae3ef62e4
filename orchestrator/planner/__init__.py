"""The adaptive planner: costs of passes, values of drafts, and the plan of the next round.

For `orchestrator.request` and `orchestrator.app`; `base` is the interface, `adaptive` the planner.
"""
