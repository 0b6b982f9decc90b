"""Which query may not look at which key. Everywhere True means *forbidden*."""

from __future__ import annotations

from typing import Literal, cast, get_args

import torch
from torch import Tensor

from ..errors import refuse

MaskType = Literal["no_mask", "causal", "causal_bottom_right", "padding", "padding_causal", "arbitrary"]
AttentionMask = Tensor | tuple[Tensor, Tensor] | None


def mask_type_of(owner: str, name: str) -> MaskType:
    """One of the names that megatron-core's `AttnMaskType` has."""
    if name not in get_args(MaskType):
        refuse(owner, "attn_mask_type", name)
    return cast("MaskType", name)


def after(query_positions: Tensor, keys: int, shift: int = 0) -> Tensor:
    """Causality: forbids key j to the query at position i if j > i + shift. Shape (queries, keys)."""
    return torch.arange(keys, device=query_positions.device) > query_positions[:, None] + shift


def forbidden_pairs(owner: str, mask_type: MaskType, mask: AttentionMask, queries: int, keys: int) -> Tensor | None:
    """What padded input (`sbhd`, `bshd`) forbids: broadcastable to (batch, heads, queries, keys), or None for nothing.

    `mask`: for `padding` (batch, 1, 1, keys), or a pair of those for queries and keys; otherwise anything that
    broadcasts to (batch, heads, queries, keys). A mask beside `causal` adds to it: Transformer Engine asks for None
    there, verl gives one.
    """
    positions = torch.arange(queries)
    if mask_type == "no_mask":
        if mask is not None:
            refuse(owner, "attention_mask", "a mask", "attn_mask_type is no_mask")
        return None
    if mask_type in ("padding", "padding_causal", "arbitrary") and mask is None:
        raise ValueError(f"{owner}: attn_mask_type={mask_type} needs an attention_mask")
    if isinstance(mask, tuple):
        of_queries, of_keys = (_checked(owner, part) for part in mask)
        if of_queries.shape[-2:] != (1, queries) or of_keys.shape[-2:] != (1, keys):
            refuse(owner, "attention_mask", [tuple(part.shape) for part in mask], "wrong shapes")
        given: Tensor | None = of_queries.transpose(-1, -2) | of_keys
    else:
        given = None if mask is None else _checked(owner, mask)
    if given is not None and (given.shape[-1] != keys or given.shape[-2] not in (1, queries)):
        refuse(owner, "attention_mask", tuple(given.shape), f"does not fit {queries} queries and {keys} keys")
    if mask_type in ("padding", "arbitrary"):
        return given
    causal = after(positions, keys, keys - queries if mask_type == "causal_bottom_right" else 0)
    return causal if given is None else given | causal.to(given.device)


def local_padding(owner: str, mask: Tensor) -> Tensor:
    """The padding in this rank's part of a padded batch under context parallelism: (batch, 1, tokens), True where
    padding.

    verl describes the part by a mask over its own tokens only, (batch, 1, tokens, tokens). That says all there is to
    say if it is no more than causality and padding; its diagonal is then the padding. Anything else is refused.
    """
    square = _checked(owner, mask)
    tokens = square.shape[-1]
    if square.shape[1:] != (1, tokens, tokens):
        refuse(owner, "attention_mask", tuple(mask.shape), "with context parallelism: (batch, 1, tokens, tokens) only")
    padding = square.diagonal(dim1=-2, dim2=-1)
    causal = after(torch.arange(tokens, device=mask.device), tokens)
    if not torch.equal(square, causal | padding[..., None] | padding[..., None, :]):
        refuse(owner, "attention_mask", tuple(mask.shape), "with context parallelism: causality and padding only")
    return padding


def _checked(owner: str, mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool or mask.dim() != 4:
        refuse(owner, "attention_mask", f"{mask.dtype} {tuple(mask.shape)}", "must be bool with four dimensions")
    return mask
