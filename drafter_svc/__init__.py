"""The drafter service: proposes token trees after the committed tokens of many sequences.

Start reading at `session.Session`; `drafters.base` is the contract of a kind. Other services meet it over gRPC only.
"""
