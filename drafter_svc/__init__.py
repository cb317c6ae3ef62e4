"""Drafter service: proposes token trees after the committed tokens of many sequences.

Start reading at `session.Session`; `drafters.base` is the interface of a drafter kind. Other services use gRPC only.
"""
