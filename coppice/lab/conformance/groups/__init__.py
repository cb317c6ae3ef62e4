"""One file per group; `catalogue.py` finds every module here by its `GROUP`."""
