"""Measurements and proofs, none of it for serving: benchmarks, simulator, conformance, a faulty network.

It may import services; no service imports it.
"""
