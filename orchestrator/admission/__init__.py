"""Which request may start: queue, fair shares, pace.

For `orchestrator.api`.
"""
