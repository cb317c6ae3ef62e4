"""The HTTP/2 guard: stands in front of a gRPC server and lets no client's frames hurt the other clients.

`guard.py` accepts connections; `connection.py` opens and closes one of them with its connection to the server;
`client_frames.py` and `server_frames.py` read the two directions; `calls.py` holds calls until their first message is
complete, `streams.py` follows one of them; `turnstile.py` paces what costs work, `limits.py` bounds the rest;
`frames.py` is HTTP/2's own format.
"""
