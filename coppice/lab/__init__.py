"""What measures and proves, and serves nobody: benchmarks, simulator, conformance, a faulty network.

It may import services; no service imports it.
"""
