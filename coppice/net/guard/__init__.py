"""The HTTP/2 guard: a proxy in front of a gRPC server that keeps any client's frames from harming other clients.

`guarded_server.py` accepts connections; `connection.py` pairs each with one to the server; `client_frames.py` and
`server_frames.py` read the two directions; `calls.py` holds calls until their first message is complete, `streams.py`
has the state of one; `turnstile.py` schedules work fairly, `limits.py` has bounds; `../frames.py` is the HTTP/2 format.
"""
