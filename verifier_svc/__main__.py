"""`python -m verifier_svc`: the verifier process, configured by environment variables (see config.py)."""

from __future__ import annotations

from coppice.openmp import set_spin_count


def main() -> None:
    """Say how threads wait, which has to come before torch is imported; then run the verifier."""
    set_spin_count()
    from verifier_svc.app import run_verifier

    run_verifier()


if __name__ == "__main__":
    main()
