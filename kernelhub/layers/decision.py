"""Decision: what shall become of one layer, in each mode, before anything is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kernelhub.layers.contract import STANDARD_LOSS
from kernelhub.layers.fitting import is_attention, is_loss_of, original_of
from kernelhub.layers.outcome import NO_ERRORS, NO_KERNELS, Kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernelhub.errors import KernelHubError
    from kernelhub.layers.discovery import Target
    from kernelhub.layers.layout import Layout
    from kernelhub.layers.report import Row

__all__ = ["NO_KERNELS", "Decision", "Kernel", "original_of", "settle"]

_BOUND = ("bound", "would bind")


class Decision(NamedTuple):
    """What becomes of one layer, or of the layers of a fusion.

    ``facts`` are the rows of its report without the module, ``kernels`` those for each of ``SERVED`` (None: its own
    forward), ``errors`` what a strict call raises if the entry binds nothing at all in that mode. ``layouts`` are what
    kernels with parameters of their own run on.
    """

    target: Target
    facts: tuple[Row, ...]
    kernels: tuple[Kernel | None, ...] = NO_KERNELS
    errors: tuple[KernelHubError | None, ...] = NO_ERRORS
    layouts: tuple[tuple[Kernel, Layout], ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        title = self.target.title
        return tuple([fact._replace(module=title) for fact in self.facts])

    @property
    def accepted(self) -> bool:
        return self.facts[0].state in _BOUND

    @property
    def is_loss(self) -> bool:
        """Is it the loss function of the model that is replaced, not a forward?"""
        if self.target.layer != STANDARD_LOSS:
            return False
        return any(kernel is not None and is_loss_of(self.target, kernel.value) for kernel in self.kernels)

    @property
    def is_attention(self) -> bool:
        """Is it the attention function of a layer that is replaced, by the table that it is looked up in?"""
        return is_attention(self.target)

    def skip(self, reason: str) -> Decision:
        return Decision(self.target, (self.facts[0]._replace(state="skipped", reason=reason, note=""),))


def settle(decisions: Sequence[Decision]) -> list[Decision]:
    """Skip what is inside something that is replaced as a whole: only one of the two can take effect."""
    if not any(each.target.function or each.layouts for each in decisions):
        return list(decisions)
    whole = {
        id(module): each.target.layer
        for each in decisions
        if each.accepted and not each.target.function and not each.is_loss
        for module in each.target.modules
    }
    gone = _done_without(decisions)
    return [_settled(decision, whole, gone) for decision in decisions]


def _settled(decision: Decision, whole: dict[int, str], gone: dict[int, str]) -> Decision:
    module = id(decision.target.module)
    if not decision.accepted:
        return decision
    if module in gone:
        return decision.skip(f"inside a layer that the entry {gone[module]!r} replaces")
    if decision.target.function and module in whole:
        return decision.skip(f"its whole forward is replaced by the entry {whole[module]!r}")
    return decision


def _done_without(decisions: Sequence[Decision]) -> dict[int, str]:
    """The modules inside layers whose kernels do without them, with the entry of those."""
    return {
        id(inner): decision.target.layer
        for decision in decisions
        if decision.layouts and decision.accepted
        for module in decision.target.modules
        for inner in module.modules()
        if inner is not module and not any(layout.keeps(inner) for _, layout in decision.layouts)
    }
