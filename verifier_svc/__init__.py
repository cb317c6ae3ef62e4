"""The verifier: owns the target model, verifies token trees in batched passes."""
