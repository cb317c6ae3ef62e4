"""Measurements and proofs, none of it for serving: benchmarks, simulator, conformance.

It may import services; no service imports it.
"""
