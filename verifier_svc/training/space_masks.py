"""The trained part of `coppice train space`: masks' embeddings and low-rank additions on a frozen target.

Text is read once, without gradients, by the target alone; groups of masks then attend to its keys and values, with the
additions enabled. Rows of text are thus computed as in service, bit for bit, and gradients cost only the masks' rows.

Axes: R rows of text, L tokens of a row, G groups, K masks of a group, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coppice.checkpoints.hf_cache import cache_argument
from coppice.core.errors import IncompatibleError
from coppice.search.error_scales import ErrorScales
from coppice.training.block_layout import BlockLayout
from coppice.training.transition import TrainedTransition
from verifier_svc.extras.redraft.adapter import LowRank, SpaceAdapter, Transition
from verifier_svc.layers.registry import recurrent_modules
from verifier_svc.training.group_states import GroupStates, group_states

# Initial masks are the mean embedding plus noise of this share of the embeddings' spread.
_MASK_SPREAD = 0.1
_PROBE_TOKENS = 5


class SpaceMasks(nn.Module):
    """Trainable masks and additions; the frozen target is held but not registered."""

    def __init__(
        self,
        target: PreTrainedModel,
        num_masks: int,
        rank: int,
        seed: int,
        *,
        modules: Sequence[str] = (),
        transition_rank: int = 0,
    ) -> None:
        """Additions are initialised with zero, so that masks begin with the target's output for an unknown token.

        With a `transition_rank`, a mask's output also depends on the token before the predicted one. `modules` are the
        linear layers with additions, by the last part of their names; all if empty. Raises IncompatibleError if the
        target has no layer for additions, or none of such a name.
        """
        super().__init__()
        for parameter in target.parameters():
            parameter.requires_grad_(False)
        # In a tuple, so that it is not registered as a submodule.
        self._target = (target,)
        generator = torch.Generator().manual_seed(seed)
        self.transition = TrainedTransition(target, transition_rank, generator) if transition_rank else None
        self.masks = _first_masks(target, num_masks, seed)
        self._names = list(_layers_of_every_row(target))
        if not self._names:
            raise IncompatibleError(f"{type(target).__name__} has no linear layer that additions could be put on")
        if unknown := set(modules) - {_last_part(name) for name in self._names}:
            raise IncompatibleError(f"{type(target).__name__} has no linear layers {', '.join(sorted(unknown))}")
        if modules:
            self._names = [name for name in self._names if _last_part(name) in modules]
        layers = dict(target.named_modules())
        self.down, self.up = nn.ParameterList(), nn.ParameterList()
        self._is_on = False
        for number, name in enumerate(self._names):
            width_in, width_out = _widths(layers[name])
            self.down.append(nn.Parameter(torch.randn(rank, width_in, generator=generator) * width_in**-0.5))
            self.up.append(nn.Parameter(torch.zeros(width_out, rank)))
            layers[name].register_forward_hook(self._hook(number))

    @property
    def num_masks(self) -> int:
        """Masks per group."""
        return int(self.masks.num_embeddings)

    def forward(self, token_ids: Tensor, layout: BlockLayout) -> Tensor:
        """Logits [R, G, 1 + K, V]: the target's own after the anchors of `layout`, then those of the masks there.

        Of the text after an anchor, masks see nothing, and the transition the token before each predicted one.

        Args:
            token_ids: text [R, L].
            layout: positions of the groups; K is at most the number of masks.
        """
        target = self._target[0]
        # Recurrent layers compute one text at a time.
        parts = token_ids.split(1) if recurrent_modules(target) else (token_ids,)
        with group_states(target, layout) as states:
            pairs = [self._read_and_said(part, layout, states) for part in parts]
        read, said = (torch.cat(logits) for logits in zip(*pairs, strict=True))
        if self.transition is not None:
            said = said + self.transition(token_ids[:, layout.predicted[:, :-1]])
        return torch.cat([read[:, :, None], said], 2)

    def _read_and_said(self, token_ids: Tensor, layout: BlockLayout, states: GroupStates) -> tuple[Tensor, Tensor]:
        """Logits after the anchors [R, G, V], and of the masks [R, G, K, V] without the transition."""
        target: Any = self._target[0]
        rows, groups = len(token_ids), len(layout.anchors)
        config = {"config": target.config} if recurrent_modules(target) else {}
        held = {cache_argument(target.forward): DynamicCache(**config)}
        states.begin_text()
        with torch.no_grad():
            read = target(input_ids=token_ids, use_cache=True, logits_to_keep=layout.anchors, **held)
        length = token_ids.shape[1]
        states.begin_groups()
        inputs = self.masks.weight[: layout.num_masks].repeat(groups, 1).to(target.dtype)
        self._is_on = True
        try:
            said: Tensor = target(
                inputs_embeds=inputs.expand(rows, -1, -1),
                attention_mask=layout.visible[length:].expand(rows, 1, -1, -1),
                position_ids=layout.positions[length:].expand(rows, -1),
                use_cache=True,
                **held,
            ).logits
        finally:
            self._is_on = False
        return read.logits, said.unflatten(1, (groups, layout.num_masks))

    def adapter(self, sigmas: ErrorScales) -> SpaceAdapter:
        """Trained weights in the verifier's format, in bfloat16."""
        low_rank = {
            name: LowRank(down.detach().bfloat16(), up.detach().bfloat16())
            for name, down, up in zip(self._names, self.down, self.up, strict=True)
        }
        transition = None
        if self.transition is not None:
            before, behind = self.transition.before, self.transition.behind
            transition = Transition(before.detach().bfloat16(), behind.detach().bfloat16())
        return SpaceAdapter(self.masks.weight.detach().bfloat16(), low_rank, sigmas, transition)

    def _hook(self, number: int) -> Any:
        def add(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if not self._is_on:
                return None
            values = inputs[0]
            down, up = self.down[number].to(values.dtype), self.up[number].to(values.dtype)
            return output + F.linear(F.linear(values, down), up)

        return add


def _first_masks(target: PreTrainedModel, num_masks: int, seed: int) -> nn.Embedding:
    """Initial masks [num_masks, H]."""
    embed: Any = target.get_input_embeddings()
    table: Tensor = embed.weight.detach().float()
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num_masks, table.shape[1], generator=generator) * table.std() * _MASK_SPREAD
    masks: nn.Embedding = nn.Embedding.from_pretrained(table.mean(0) + noise, freeze=False)
    return masks


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _widths(module: nn.Module) -> tuple[int, int]:
    """Input and output width of a linear layer."""
    weight: Any = module.weight
    wide, narrow = weight.shape
    # GPT-2's layers are Conv1D, with transposed weights.
    return (wide, narrow) if isinstance(module, Conv1D) else (narrow, wide)


def _layers_of_every_row(target: PreTrainedModel) -> Iterator[str]:
    """Names of linear layers inside the target that compute each row of a pass: not an expert's, which get routed rows,
    and not the output layer."""
    seen: dict[str, bool] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _module, inputs, name=name: seen.__setitem__(name, inputs[0].shape[:-1] == (1, _PROBE_TOKENS))
        )
        for name, module in target.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not target.get_output_embeddings()
    ]
    try:
        with torch.no_grad():
            target(input_ids=torch.zeros(1, _PROBE_TOKENS, dtype=torch.long), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return (name for name, sees_every_row in seen.items() if sees_every_row)
