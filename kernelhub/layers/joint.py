"""Joint: parameters that lie one after the other in one piece of memory, which then is their concatenation.

``join`` moves them there and ``part`` takes them apart; they stay the same ``Parameter`` objects, so optimizers,
``state_dict`` and ``load_state_dict`` work on them as before, and the whole follows without a copy. Nothing remembers
that they are joint: each use looks where they are. What moves parameters later (``model.to``, sharding, a deep copy)
makes the whole a copy again, never a stale one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_compiling

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


def joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The concatenation, for gradients to flow through: the memory itself where the parts are joint, else a copy."""
    if dim == 0 and not is_compiling():
        whole = _whole(parts)
        if whole is not None:
            if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
                return _Whole.apply(*parts)  # type: ignore[no-any-return, no-untyped-call]  # torch leaves it untyped
            return whole
    return torch.cat(tuple(parts), dim)


def join(parts: Sequence[torch.Tensor], elsewhere: Collection[int]) -> bool:
    """Move parameters into one piece of memory; False, and nothing moved, where somebody else may know the old one.

    ``elsewhere`` are addresses that other parameters of the model have too.
    """
    if len({(part.dtype, part.device) for part in parts}) > 1 or not all(_is_free(part, elsewhere) for part in parts):
        return False
    whole = torch.cat([part.data for part in parts])
    for part, piece in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
        part.data = piece
    return True


def part(parts: Sequence[torch.Tensor]) -> None:
    """The inverse of ``join``: parameters that are still joint get memory of their own again."""
    if _whole(parts) is not None and parts[0].untyped_storage().nbytes() == sum(each.nbytes for each in parts):
        for each in parts:
            each.data = each.data.clone()


def addresses_in_use(parameters: Sequence[torch.Tensor]) -> set[int]:
    """The addresses that more than one parameter has: they are tied by their memory."""
    seen: set[int] = set()
    shared: set[int] = set()
    for parameter in parameters:
        if type(parameter) is nn.Parameter and parameter.numel() and parameter.device.type != "meta":
            address = parameter.data_ptr()
            (shared if address in seen else seen).add(address)
    return shared


class _Whole(torch.autograd.Function):
    """Joint parameters to their concatenation, without a copy; a parameter changed before backward is an error."""

    @staticmethod
    def forward(*parts: torch.Tensor) -> torch.Tensor:
        whole = _whole(parts)
        return torch.cat(parts) if whole is None else whole

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pieces = torch.split(grad[0], [len(part) for part in ctx.saved_tensors])
        return tuple(piece if needed else None for piece, needed in zip(pieces, ctx.needs_input_grad, strict=True))


def _whole(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The concatenation of joint parameters as a view of their memory; None where they are not joint."""
    first = parts[0]
    end, rows, base = None, 0, None
    for each in parts:
        # Only plain parameters have an address: not those of vmap, DTensors, or what tracing puts in their place.
        if type(each) is not nn.Parameter or not each.is_contiguous():
            return None
        if end is not None and (
            each.data_ptr() != end or each.dtype != first.dtype or each.shape[1:] != first.shape[1:]
        ):
            return None
        if each.untyped_storage().data_ptr() != base and base is not None:
            return None
        base = each.untyped_storage().data_ptr()
        end = each.data_ptr() + each.nbytes
        rows += len(each)
    data = first.data
    return data.as_strided((rows, *first.shape[1:]), first.stride(), data.storage_offset())


def _is_free(parameter: torch.Tensor, elsewhere: Collection[int]) -> bool:
    """May this parameter be moved: is it plain, alone in its memory, and not shared with another process?"""
    if type(parameter) is not nn.Parameter or not parameter.is_contiguous() or not parameter.numel():
        return False
    if parameter.is_inference() or parameter.data_ptr() in elsewhere:
        return False
    if parameter.device.type == "cpu" and parameter.untyped_storage().is_shared():
        return False
    return parameter.untyped_storage().nbytes() == parameter.nbytes
