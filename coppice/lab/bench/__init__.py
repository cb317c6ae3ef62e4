"""What `coppice bench` runs: prompts, contenders, measurement, summary, report; one idea per module."""
