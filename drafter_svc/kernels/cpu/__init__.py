"""The drafters' kernels for CPUs: a Llama's pass with weights of 8 bits, and the search that is made of such passes.

For `drafter_svc.model`. What the verifier needs as well is in `coppice.kernels.cpu`.
"""
