"""Conversion between our types and protobuf."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from coppice.core.denoising import LEFT_TO_DRAFTER, Denoising
from coppice.core.draft_distribution import DraftDistribution
from coppice.core.errors import CoppiceError, InvalidRequestError, InvalidTreeError
from coppice.core.grammar import Grammar, GrammarKind
from coppice.core.log_probs import TokenLogProbs
from coppice.core.sampled_tree import SampledTree
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tree import EMPTY_TREE, MAX_TREE_NODES, TokenTree
from coppice.v1 import inference_pb2, sampling_pb2, tree_pb2, verifier_pb2

Value = TypeVar("Value")

# Bits of a node's mask of sources.
_MAX_SOURCES = 32


def tree_to_proto(tree: TokenTree) -> tree_pb2.TokenTree:
    """Message of a tree."""
    message = tree_pb2.TokenTree()
    put_tree(tree, message)
    return message


def put_tree(tree: TokenTree, message: tree_pb2.TokenTree) -> None:
    """Write a tree into an empty message in place, without the copy of a nested message."""
    message.token_ids.extend(tree.token_ids)
    message.parents.extend(tree.parents)
    message.log_probs.extend(tree.log_probs)
    message.sources.extend(tree.sources)
    message.source_names.extend(tree.source_names)
    for distribution in tree.distributions:
        message.distribution_sizes.append(0 if distribution is None else len(distribution))
        if distribution is not None:
            message.distribution_token_ids.extend(distribution.token_ids)
            message.distribution_weights.extend(distribution.weights)


def tree_from_proto(message: tree_pb2.TokenTree) -> TokenTree:
    """Tree of a message; missing log-probabilities count as 0.

    Raises:
        InvalidTreeError: the message has more than MAX_TREE_NODES nodes or _MAX_SOURCES sources, is not a valid tree,
            or has distributions that its nodes cannot be draws from.
    """
    count = len(message.token_ids)
    # Lengths first: reading a list of a million entries takes 20 ms.
    if count > MAX_TREE_NODES:
        raise InvalidTreeError(f"{count} nodes; the most are {MAX_TREE_NODES}")
    longest = max(
        len(message.parents), len(message.log_probs), len(message.sources), len(message.distribution_sizes) - 1
    )
    if longest > count:
        raise InvalidTreeError(f"{count} nodes and a list of {longest} entries")
    if len(message.source_names) > _MAX_SOURCES:
        raise InvalidTreeError(f"{len(message.source_names)} sources; the most are {_MAX_SOURCES}")
    if not message.ByteSize():
        return EMPTY_TREE
    # Slices copy at once; iterators would go through the values one by one.
    tree = TokenTree(
        token_ids=tuple(message.token_ids[:]),
        parents=tuple(message.parents[:]),
        log_probs=tuple(message.log_probs[:]) or (0.0,) * count,
        source_names=tuple(message.source_names),
        sources=tuple(message.sources),
        distributions=_distributions(message) if message.distribution_sizes else (),
    )
    if tree.distributions:
        SampledTree.of(tree)
    return tree


def samples_drafts(acceptance: sampling_pb2.AcceptanceRule, temperature: float) -> bool:
    """Whether drafts must be sampled trees. At temperature 0 every rule is sample-and-follow."""
    return acceptance == sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL and temperature > 0


def sampling_from_proto(message: sampling_pb2.SamplingParams) -> SamplingParams:
    """Sampling parameters of a message, with defaults for unset fields.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    defaults = SamplingParams()
    return SamplingParams(
        temperature=_or(message, "temperature", defaults.temperature),
        top_k=_or(message, "top_k", defaults.top_k),
        top_p=_or(message, "top_p", defaults.top_p),
        min_p=_or(message, "min_p", defaults.min_p),
        repetition_penalty=_or(message, "repetition_penalty", defaults.repetition_penalty),
        presence_penalty=_or(message, "presence_penalty", defaults.presence_penalty),
        frequency_penalty=_or(message, "frequency_penalty", defaults.frequency_penalty),
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_token_ids=tuple(message.bad_token_ids),
        seed=_or(message, "seed", defaults.seed),
        grammar=_grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
    )


def sampling_to_proto(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """Message of sampling parameters, with every field set."""
    return sampling_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        allowed_token_ids=params.allowed_token_ids,
        bad_token_ids=params.bad_token_ids,
        seed=params.seed,
        grammar=None if params.grammar is None else _grammar_to_proto(params.grammar),
    )


def denoising_from_proto(message: sampling_pb2.Denoising) -> Denoising:
    """Denoising settings of a message; unset ones are left to the drafter.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    return Denoising(message.steps, message.block_tokens)


def denoising_to_proto(denoising: Denoising) -> sampling_pb2.Denoising | None:
    """Message of denoising settings; None if all are left to the drafter."""
    if denoising == LEFT_TO_DRAFTER:
        return None
    return sampling_pb2.Denoising(steps=denoising.steps, block_tokens=denoising.block_tokens)


def stopping_from_proto(message: sampling_pb2.StoppingOptions) -> StoppingOptions:
    """Stopping options of a message, with defaults for unset fields.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    return StoppingOptions(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=_or(message, "min_tokens", 0),
        stop_strings=tuple(message.stop_strings),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=_or(message, "ignore_eos", False),
    )


def stopping_to_proto(options: StoppingOptions) -> sampling_pb2.StoppingOptions:
    """Message of stopping options."""
    return sampling_pb2.StoppingOptions(
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        stop_strings=options.stop_strings,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
    )


def add_log_probs(message: verifier_pb2.Outcome, log_probs: Sequence[TokenLogProbs]) -> None:
    """Write log-probabilities, one per token or none, into an outcome's message."""
    for one in log_probs:
        message.log_probs.append(one.log_prob)
        message.top_token_ids.extend(one.top_token_ids)
        message.top_log_probs.extend(one.top_log_probs)


def outcome_log_probs(message: verifier_pb2.Outcome) -> tuple[TokenLogProbs, ...]:
    """Log-probabilities of an outcome's tokens; empty if it has none.

    Raises:
        CoppiceError: their number does not match the tokens.
    """
    if not message.log_probs:
        return ()
    num_tokens, num_top = len(message.token_ids), len(message.top_token_ids)
    if len(message.log_probs) != num_tokens or num_top % num_tokens or num_top != len(message.top_log_probs):
        raise CoppiceError("the verifier's log-probabilities do not fit its tokens")
    width = num_top // num_tokens
    ids, values = tuple(message.top_token_ids), tuple(message.top_log_probs)
    return tuple(
        TokenLogProbs(log_prob, ids[at * width : (at + 1) * width], values[at * width : (at + 1) * width])
        for at, log_prob in enumerate(message.log_probs)
    )


def log_probs_to_proto(log_probs: Iterable[TokenLogProbs]) -> list[inference_pb2.TokenLogProbs]:
    """Messages of log-probabilities in the public API."""
    return [
        inference_pb2.TokenLogProbs(
            log_prob=one.log_prob, top_token_ids=one.top_token_ids, top_log_probs=one.top_log_probs
        )
        for one in log_probs
    ]


def log_probs_from_proto(messages: Iterable[inference_pb2.TokenLogProbs]) -> tuple[TokenLogProbs, ...]:
    """Log-probabilities of messages of the public API."""
    return tuple(
        TokenLogProbs(message.log_prob, tuple(message.top_token_ids), tuple(message.top_log_probs))
        for message in messages
    )


def _distributions(message: tree_pb2.TokenTree) -> tuple[DraftDistribution | None, ...]:
    sizes = tuple(message.distribution_sizes)
    token_ids, weights = tuple(message.distribution_token_ids), tuple(message.distribution_weights)
    if not sum(sizes) == len(token_ids) == len(weights):
        raise InvalidTreeError(f"distributions of {sum(sizes)} tokens, {len(token_ids)} ids and {len(weights)} weights")
    ends = itertools.accumulate(sizes)
    return tuple(
        DraftDistribution(token_ids[end - size : end], weights[end - size : end]) if size else None
        for size, end in zip(sizes, ends, strict=True)
    )


def _grammar_from_proto(message: sampling_pb2.Grammar) -> Grammar:
    kind = message.WhichOneof("rule")
    if kind is None:
        raise InvalidRequestError("sampling.grammar", "exactly one of json_schema and regex must be set")
    return Grammar(GrammarKind(kind), getattr(message, kind))


def _grammar_to_proto(grammar: Grammar) -> sampling_pb2.Grammar:
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return sampling_pb2.Grammar(json_schema=grammar.text)
    return sampling_pb2.Grammar(regex=grammar.text)


def _or(message: Message, name: str, default: Value) -> Value:
    if not message.HasField(name):
        return default
    value: Value = getattr(message, name)
    return value
