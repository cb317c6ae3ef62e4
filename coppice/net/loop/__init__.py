"""gRPC calls on the event loop itself, without gRPC's threads: one request, and a stream of messages.

Each message costs one wake-up of the process, where gRPC hands it from thread to thread. `channel.py` connects,
`connection.py` reads and writes HTTP/2, `call.py` has the messages and the end of a call.
"""
