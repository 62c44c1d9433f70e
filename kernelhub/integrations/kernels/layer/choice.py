"""Choice: what a mapping has for the marked layers of one model, loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kernelhub.backend import Release, backend_kind
from kernelhub.config import ANY_DEVICE, KernelChoice, LayerEntry
from kernelhub.errors import InvalidBackend, NoKernel
from kernelhub.integrations.kernels.layer.fallback import KernelizeFallback
from kernelhub.integrations.kernels.layer.function import layer_function
from kernelhub.integrations.kernels.layer.repository import Repository
from kernelhub.layers.contract import mode_mismatch
from kernelhub.layers.discovery import function_modules, walk
from kernelhub.layers.marker import mark_of
from kernelhub.layers.symbol import LoadedSymbol
from kernelhub.mode import Mode
from kernelhub.request import KernelRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from kernelhub.integrations.kernels.layer.device import Device
    from kernelhub.integrations.kernels.layer.mapping import KernelMapping
    from kernelhub.integrations.kernels.layer.mode import Mode as FlagMode
    from kernelhub.integrations.kernels.layer.repository import RepositoryProtocol

_NOTHING = LoadedSymbol(None, "", "", "")
_logger = logging.getLogger("kernelhub")


@dataclass(frozen=True)
class LoadedChoice(KernelChoice):
    """A choice whose kernel is loaded already."""

    found: LoadedSymbol = _NOTHING

    def __str__(self) -> str:
        return f"{self.found.kernel}:{self.found.symbol}"


class Place(NamedTuple):
    """The backend whose kernels are wanted, and the device key of entries for it.

    A device that the caller names counts for the whole model, wherever its parameters are now.
    """

    backend: str
    key: str = ANY_DEVICE


@dataclass
class MarkedLayer:
    """The modules of a model that one layer name marks, and whether all of them are functions."""

    modules: list[nn.Module] = field(default_factory=list)
    all_functions: bool = True

    @property
    def wants_kernel(self) -> bool:
        """Does the condition of at least one module allow a kernel?"""
        return any(_allows(module) for module in self.modules)


class _Candidate(NamedTuple):
    repository: RepositoryProtocol
    mode: FlagMode


class _Lacking(NamedTuple):
    """What a mapping lacks for a layer, as a case in which to fall back."""

    case: KernelizeFallback
    problem: str


def place_of(
    model: nn.Module, device: str | torch.device | Device | None, backend_of: Callable[[torch.device], str]
) -> Place:
    """The place to look kernels up for: the device that the caller names, else that of the model's parameters.

    Raises:
        InvalidBackend: no such device, or none is named and the model has no parameters.
    """
    if device is None:
        parameter = next(model.parameters(), None)
        if parameter is None:
            raise InvalidBackend(None, "the model has no parameters that tell its device", "device='cpu', for example")
        backend = backend_of(parameter.device)
        return Place(backend, backend)
    if isinstance(device, torch.device):
        return Place(backend_of(device))
    return Place(backend_kind(device if isinstance(device, str) else device.type).name)


def marked_layers(model: nn.Module) -> dict[str, MarkedLayer]:
    """The marked modules of a model and the functions attached to them, by layer name."""
    found: dict[str, MarkedLayer] = {}
    for _, module in walk(model):
        name = mark_of(module)
        if name is not None:
            marked = found.setdefault(name, MarkedLayer())
            marked.modules.append(module)
            marked.all_functions = False
        for key, function in function_modules(module):
            found.setdefault(mark_of(function) or key, MarkedLayer()).modules.append(function)
    return found


class Chooser:
    """Finds and loads what a mapping has for one place and mode; each repository is loaded once."""

    def __init__(self, mapping: KernelMapping, place: Place, mode: Mode, fallback: KernelizeFallback) -> None:
        self._mapping = mapping
        self._place = place
        self._mode = mode
        self._fallback = fallback
        self._loaded: dict[RepositoryProtocol, LoadedSymbol] = {}

    def entries(self, layers: dict[str, MarkedLayer]) -> Iterator[LayerEntry]:
        """An entry for each layer that gets a kernel.

        Raises:
            NoKernel: there is none, and that is no case to fall back in.
            KernelHubError: a kernel cannot be loaded, and that is none either.
        """
        for layer, marked in layers.items():
            if not marked.wants_kernel:
                _logger.info("layer %s: its own condition allows no kernel", layer)
                continue
            found = self._choose(layer, marked)
            if found is not None:
                choices = (((self._place.key, Mode.FALLBACK), LoadedChoice(KernelRequest(), found=found)),)
                yield LayerEntry(layer, choices)

    def _choose(self, layer: str, marked: MarkedLayer) -> LoadedSymbol | None:
        candidate = self._candidate(layer)
        if isinstance(candidate, _Lacking):
            self._fall_back(layer, candidate)
            return None
        try:
            found = self._load(candidate.repository)
        except FileNotFoundError as error:  # no build, or none stored: the class that any repository raises for it
            if KernelizeFallback.CANNOT_LOAD not in self._fallback:
                raise
            self._fall_back(layer, _Lacking(KernelizeFallback.CANNOT_LOAD, str(error)))
            return None
        if marked.all_functions and isinstance(found.value, type):
            found = found._replace(value=layer_function(found.value))
        if reason := mode_mismatch(found.value, candidate.mode.served):
            raise NoKernel(layer, f"it is mapped for {candidate.mode}, but {reason}")
        if reason := mode_mismatch(found.value, self._mode):
            self._fall_back(layer, _Lacking(KernelizeFallback.NO_COMPATIBLE_MODE, reason))
            return None
        return found

    def _candidate(self, layer: str) -> _Candidate | _Lacking:
        """The repository for a layer: the narrowest range of the device first, then the mode."""
        devices = self._mapping.find(layer)
        if devices is None:
            return _Lacking(KernelizeFallback.NO_LAYER, "nothing is mapped to it")
        backend = self._place.backend
        of_backend = [key for key in devices if key.backend == backend]
        if not of_backend:
            return _Lacking(KernelizeFallback.NO_DEVICE, f"nothing is mapped to it for {backend}")
        capability = _capability() if any(key.is_range for key in of_backend) else None
        holding = [key for key in of_backend if key.holds(backend, capability)]
        if not holding:
            device = f"{backend} {capability}" if capability else f"a {backend} of unknown capability"
            return _Lacking(KernelizeFallback.NO_COMPATIBLE_PROPERTIES, f"nothing is mapped to it for {device}")
        modes = devices[min(holding, key=lambda key: key.width)]
        by_mode = {mode.served: mode for mode in modes}
        for step in self._mode.lookup:
            if step in by_mode:
                return _Candidate(modes[by_mode[step]], by_mode[step])
        return _Lacking(KernelizeFallback.NO_COMPATIBLE_MODE, f"nothing is mapped to it for {self._mode.value} mode")

    def _fall_back(self, layer: str, lacking: _Lacking) -> None:
        """Say that a layer keeps its own forward, or that this is an error."""
        if lacking.case not in self._fallback:
            raise NoKernel(layer, lacking.problem)
        level = logging.WARNING if lacking.case is KernelizeFallback.NO_LAYER else logging.INFO
        _logger.log(level, "layer %s keeps its own forward: %s", layer, lacking.problem)

    def _load(self, repository: RepositoryProtocol) -> LoadedSymbol:
        if repository not in self._loaded:
            self._loaded[repository] = self._find(repository)
        return self._loaded[repository]

    def _find(self, repository: RepositoryProtocol) -> LoadedSymbol:
        if isinstance(repository, Repository):
            return repository.find(self._place.backend)
        layer: Any = repository.load()
        return LoadedSymbol(layer, str(repository), "", getattr(layer, "__name__", ""))


def _allows(module: nn.Module) -> bool:
    condition = getattr(type(module), "kernel_condition", None)
    return condition is None or bool(condition(module))


def _capability() -> Release | None:
    """The compute capability of the current device; None without one."""
    return Release(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
