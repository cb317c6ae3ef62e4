"""CPU kernels of drafters: a Llama pass with 8-bit weights, and a tree search over such passes.

For `drafter_svc.model`. Kernels shared with the verifier are in `coppice.kernels.cpu`.
"""
