"""Verifier service: owns the target model and verifies token trees in batched passes.

Start reading at `engine.engine.Engine`. Other services use gRPC only.
"""
