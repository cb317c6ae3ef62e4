"""Admission control: queue, fair shares, throughput estimates.

For `orchestrator.api`.
"""
