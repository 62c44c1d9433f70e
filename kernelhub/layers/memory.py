"""Peak memory of a piece of work: counted by the allocator on CUDA, by tensor storage elsewhere."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable


def peak_memory(work: Callable[[], object], device: torch.device) -> int:
    """The largest number of bytes that ``work`` held at once beyond what was held before.

    On CUDA and ROCm this is the caching allocator's own figure. Elsewhere every storage that an operator returns is
    counted from its creation to its end; scratch memory inside one operator is not seen.
    """
    if device.type == "cuda":
        return _peak_of_allocator(work, device)
    with _LiveStorages() as live:
        work()
    return int(live.peak)


def _peak_of_allocator(work: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


class _LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves this base untyped
    """Sees every operator's results, also those of the backward pass, and adds up the storages that are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.peak = 0
        self._bytes = 0
        self._live: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if _has_storage(leaf)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if _has_storage(leaf) and id(leaf.untyped_storage()) not in known:
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key = id(storage)
        if key in self._live:
            return
        size = storage.nbytes()
        self._bytes += size
        self.peak = max(self.peak, self._bytes)
        self._live[key] = weakref.ref(storage, lambda _: self._forget(key, size))

    def _forget(self, key: int, size: int) -> None:
        self._bytes -= size
        self._live.pop(key, None)


def _has_storage(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and leaf.device.type != "meta"
