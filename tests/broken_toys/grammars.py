"""Deployments whose outputs do not keep their grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.api.validation import GenerationRequest
from tests.toy_deployment import ToyDeployment
from tests.toy_target import EOS
from verifier_svc.verify.sampler import Mask
from verifier_svc.verify.token_choice import Constraint


class FreeForm(ToyDeployment):
    """Forgets a grammar, always or when it speculates."""

    def __init__(self, *, only_speculating: bool = False) -> None:
        super().__init__()
        self._only_speculating = only_speculating

    def constraint(self, request: GenerationRequest, end_token_ids: Sequence[int]) -> Constraint | None:
        if self._only_speculating and not request.speculates:
            return super().constraint(request, end_token_ids)
        return None


class FormFromTheStart(ToyDeployment):
    """Begins a grammar anew when a call goes on after another."""

    def constraint(self, request: GenerationRequest, end_token_ids: Sequence[int]) -> Constraint | None:
        return super().constraint(replace(request, resume_ids=()), end_token_ids)


class Incomplete:
    """A constraint that never says that nothing may follow."""

    is_complete = False

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint

    @property
    def allowed(self) -> Mask:
        return self._constraint.allowed

    def push(self, token: int) -> None:
        self._constraint.push(token)


class EndsTooLate(ToyDeployment):
    """Waits for a token that ends the output, though nothing else may follow."""

    def constraint(self, request: GenerationRequest, end_token_ids: Sequence[int]) -> Constraint | None:
        constraint = super().constraint(request, (EOS,))
        return None if constraint is None else Incomplete(constraint)
