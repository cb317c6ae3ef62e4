"""`coppice bench`: a module or package per suite, which has its workload and declares what is shown of it.

`harness` takes turns, aggregates, writes and draws for all of them. Commands in `coppice.cli.bench` run the suites;
`environment` (machine, versions, commit) serves every report, those of the simulator and of the tests included.
"""
