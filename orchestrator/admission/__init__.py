"""Admission of requests: queue, fair shares, pace.

For `orchestrator.api`.
"""
