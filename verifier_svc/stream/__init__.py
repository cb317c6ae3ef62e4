"""A request's stream: messages in, events out.

For `verifier_svc.service`; the only room that knows protobuf.
"""
