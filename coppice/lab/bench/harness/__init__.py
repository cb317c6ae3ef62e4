"""One harness for all suites: an experiment is arms x loads x runs, its samples become rows and named ratios.

Suites use it; nothing here knows a suite. `experiment` takes turns and aggregates, `report` writes, `tables` and
`plots` draw what a suite declares.
"""
