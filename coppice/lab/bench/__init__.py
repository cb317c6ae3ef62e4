"""`coppice bench`: a module or package per suite, which has its workload and declares what is shown of it.

`client` asks servers for all of them; `comparison` lets contenders take turns on the same tasks; `harness` aggregates,
writes and draws. `environment` (machine, versions, commit) serves every report, those of simulator and tests included.
"""
