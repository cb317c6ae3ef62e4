"""The verifier's kernels for CPUs: attention, and products whose rows do not depend on the rows beside them.

For `verifier_svc.model` and `verifier_svc.extras`. What the drafters need as well is in `coppice.kernels.cpu`.
"""
