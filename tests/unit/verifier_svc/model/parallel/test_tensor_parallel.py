"""What a target in parts needs, and how that is told."""

from __future__ import annotations

import pytest

from coppice.core.errors import IncompatibleError
from verifier_svc.config import VerifierConfig
from verifier_svc.model.parallel import tensor_parallel


def test_a_missing_package_is_told_with_the_extra_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "is_accelerate_available", lambda: False)
    config = VerifierConfig.from_env({"MODEL": "target", "TENSOR_PARALLEL": "2"})
    # Not by the name of the package, which is another project's where packages are fetched from.
    with (
        pytest.raises(IncompatibleError, match=r"accelerate.* install -e '\.\[parallel\]'"),
        tensor_parallel.leading(config),
    ):
        pass
