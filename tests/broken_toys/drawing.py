"""Deployments that draw other tokens than they should, or draft when they should not."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.api.validation import GenerationRequest
from tests.toy_deployment import MAX_NODES, ToyDeployment, toy_logits
from verifier_svc.verify.token_choice import TokenChooser


class WrongDraftAccepted(ToyDeployment):
    """Now and then keeps a draft token that the target did not draw."""

    def draw(self, chooser: TokenChooser, tokens: Sequence[int], request: GenerationRequest, depth: int) -> int:
        token = super().draw(chooser, tokens, request, depth)
        return ord("z") if depth == 2 and len(tokens) % 3 == 0 else token


class WrongAtTheLargestBudget(WrongDraftAccepted):
    """The same in rounds of the largest budget only."""

    def draw(self, chooser: TokenChooser, tokens: Sequence[int], request: GenerationRequest, depth: int) -> int:
        return super().draw(chooser, tokens, request, depth if request.max_nodes == MAX_NODES else 0)


class NoiseByOutputLength(ToyDeployment):
    """Draws by the place in the output, not by the absolute position."""

    def draw(self, chooser: TokenChooser, tokens: Sequence[int], request: GenerationRequest, depth: int) -> int:
        return chooser.choose(toy_logits(tuple(tokens[-3:])), len(tokens) - len(request.prompt_ids))


class ImpressedByCompany(ToyDeployment):
    """Draws other tokens in company."""

    def draw(self, chooser: TokenChooser, tokens: Sequence[int], request: GenerationRequest, depth: int) -> int:
        token = super().draw(chooser, tokens, request, depth)
        return ord("z") if self.num_running > 1 and len(tokens) % 5 == 0 else token


class SpoiltByReuse(ToyDeployment):
    """Reads a prompt that was read before, and takes it for another."""

    def reused(self, request: GenerationRequest) -> int:
        reused = super().reused(request)
        self._spoilt = reused > 100
        return reused

    def draw(self, chooser: TokenChooser, tokens: Sequence[int], request: GenerationRequest, depth: int) -> int:
        return super().draw(chooser, [*tokens[:-1], 5] if self._spoilt else tokens, request, depth)


class DraftsAnyway(ToyDeployment):
    """Drafts as much as it likes."""

    def nodes(self, request: GenerationRequest) -> int:
        return MAX_NODES


class NextSeed(ToyDeployment):
    """Gives outputs seeds that follow each other."""

    def seed(self, first: int, index: int) -> int:
        return (first + index) % 2**64
