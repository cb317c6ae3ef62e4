"""Deployments that go wrong in traversal verification alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from coppice.core.draft_distribution import DraftDistribution
from coppice.core.tree import ROOT, TokenTree
from coppice.v1.inference_pb2 import GenerateRequest
from coppice.v1.sampling_pb2 import ACCEPTANCE_RULE_TRAVERSAL
from orchestrator.api.validation import GenerationRequest
from tests.broken_toys.hearing import Deaf
from tests.toy_deployment import ToyDeployment
from verifier_svc.verify.acceptance import Acceptance
from verifier_svc.verify.sampler import Logits
from verifier_svc.verify.token_choice import TokenChooser
from verifier_svc.verify.traversal import FloatArray


class DeafToTheRule(Deaf):
    """Does not hear one field of requests that ask for the rule."""

    def hear(self, request: GenerateRequest) -> None:
        if request.speculation.acceptance == ACCEPTANCE_RULE_TRAVERSAL:
            super().hear(request)


class BelievesItsDrafter(ToyDeployment):
    """Accepts the first child of every node, whatever the target thinks of it."""

    def traverse(
        self,
        tree: TokenTree,
        logits: Logits,
        chooser: TokenChooser,
        tokens: Sequence[int],
        request: GenerationRequest,
        is_last: Callable[[int], bool],
    ) -> Acceptance:
        node, nodes, token_ids = ROOT, [], []
        while node in tree.parents:
            node = tree.parents.index(node)
            nodes.append(node)
            token_ids.append(tree.token_ids[node])
            chooser.push(token_ids[-1])
            if is_last(token_ids[-1]):
                return Acceptance(tuple(token_ids), tuple(nodes))
        token_ids.append(int(chooser.law(logits[node - ROOT], []).argmax()))
        chooser.push(token_ids[-1])
        is_last(token_ids[-1])
        return Acceptance(tuple(token_ids), tuple(nodes))


class MisjudgesItsDrafter(ToyDeployment):
    """Sends milder distributions than it drew from."""

    def sampled_tree(self, tokens: Sequence[int], request: GenerationRequest, depth: int) -> TokenTree:
        tree = super().sampled_tree(tokens, request, depth)
        milder = tuple(
            one and DraftDistribution(one.token_ids, tuple(weight**0.25 for weight in one.weights))
            for one in tree.distributions
        )
        return replace(tree, distributions=milder)


class _Forgetful:
    """A chooser whose laws do not know the paths that they are behind."""

    def __init__(self, chooser: TokenChooser) -> None:
        self._chooser, self.push = chooser, chooser.push

    def law(self, logits: Logits, path: Sequence[int]) -> FloatArray:
        return self._chooser.law(logits, [])


class ForgetsPaths(ToyDeployment):
    """Penalises every node of a tree as if it stood at the root."""

    def traverse(
        self,
        tree: TokenTree,
        logits: Logits,
        chooser: TokenChooser,
        tokens: Sequence[int],
        request: GenerationRequest,
        is_last: Callable[[int], bool],
    ) -> Acceptance:
        forgetful: TokenChooser = _Forgetful(chooser)  # type: ignore[assignment]
        return super().traverse(tree, logits, forgetful, tokens, request, is_last)


class GoesBeyondTheEnd(ToyDeployment):
    """Keeps a block of tokens whole where the output ends inside it."""

    def traverse(
        self,
        tree: TokenTree,
        logits: Logits,
        chooser: TokenChooser,
        tokens: Sequence[int],
        request: GenerationRequest,
        is_last: Callable[[int], bool],
    ) -> Acceptance:
        def not_yet(token: int) -> bool:
            is_last(token)
            return False

        return super().traverse(tree, logits, chooser, tokens, request, not_yet)
