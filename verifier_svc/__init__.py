"""The verifier service: owns the target model and verifies token trees in batched passes.

Start reading at `engine.engine.Engine`. Other services meet it over gRPC only.
"""
