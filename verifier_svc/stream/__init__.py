"""An orchestrator's stream: messages in, events out.

For `verifier_svc.service`; the only room that uses protobuf.
"""
