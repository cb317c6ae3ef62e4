"""A discrete-event model of a deployment: the orchestrator's own planning and drafting around peers that are modelled.

Times are measured and drafts are recorded (`profile.py`). Imports no torch.
"""
