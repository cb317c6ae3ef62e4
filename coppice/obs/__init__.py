"""Logs, metrics, traces and timelines.

For every service.
"""
