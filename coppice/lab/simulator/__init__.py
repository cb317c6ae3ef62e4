"""A discrete-event model of a deployment: the orchestrator's own planning and drafting around peers that are modelled.

What costs time is measured (`profile.py`), and what drafts are worth is replayed (`texts.py`). Imports no torch.
"""
