"""The HTTP/2 guard: stands in front of a gRPC server and lets no client's frames hurt the other clients.

`guard.py` accepts connections, `connection.py` follows one of them, `turnstile.py` paces what costs work,
`streams.py` holds a call until its first message is complete, `frames.py` is HTTP/2's own format.
"""
