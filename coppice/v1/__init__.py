"""Generated from protos/coppice/v1 by `make proto`; do not edit."""
