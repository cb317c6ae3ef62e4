"""OpenAI-compatible HTTP API: a thin, stateless door onto the orchestrator's public gRPC API.

A process of its own, `python -m coppice.gateway`, or `coppice up --http-port`; docs/openai.md has endpoints and fields.
It imports shared rooms and contracts, no service. `app.py` has the routes, `generation.py` one request's way through.
"""
