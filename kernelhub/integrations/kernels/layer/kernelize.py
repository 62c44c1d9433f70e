"""kernelize: bind what is mapped to the marked layers of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from kernelhub import setting
from kernelhub.config import KernelConfig
from kernelhub.errors import InvalidConfig
from kernelhub.integrations.kernels.layer.fallback import KernelizeFallback
from kernelhub.integrations.kernels.layer.mapping import (
    current_mapping,
    register_kernel_mapping,
    use_kernel_mapping,
)
from kernelhub.integrations.kernels.layer.mode import Mode
from kernelhub.session import Session

if TYPE_CHECKING:
    import torch
    from torch import nn

    from kernelhub.integrations.kernels.layer.device import Device
    from kernelhub.mode import Mode as ServedMode

    Model = TypeVar("Model", bound=nn.Module)

__all__ = ["kernelize", "register_kernel_mapping", "use_kernel_mapping"]


def kernelize(
    model: Model,
    *,
    mode: Mode,
    device: str | torch.device | Device | None = None,
    use_fallback: bool | KernelizeFallback = True,
) -> Model:
    """Bind the kernels of the mapping in force to the marked layers of ``model``, in place, and return the model.

    ``kernelhub.unkernelize`` restores it, ``kernelhub.report`` tells what was bound. What was bound before is replaced.
    With ``DISABLE_KERNEL_MAPPING`` set it is only restored.

    Args:
        model: any torch module.
        mode: what it is going to be used for, for example ``Mode.TRAINING | Mode.TORCH_COMPILE``.
        device: the type of device to bind kernels for; None takes that of the model's parameters, and binds nothing
            to layers elsewhere.
        use_fallback: when layers may keep their own forward; True is ``KernelizeFallback.DEFAULT``, False ``NONE``.

    Raises:
        InvalidConfig: the mode is none to run a model in.
        InvalidBackend: no such device, or none is given and the model has no parameters.
        NoKernel: there is no kernel for a layer, and that is no case to fall back in.
        ContractMismatch: a kernel fits none of its layers (unless ``CANNOT_LOAD`` is a case to fall back in).
        KernelHubError: what ``kernelhub.load_kernel`` raises.
    """
    served = _served(mode)
    fallback = _as_fallback(use_fallback)
    # Here, as importing these functions must not need torch.
    from kernelhub.integrations.kernels.layer.choice import Chooser, marked_layers, place_of  # noqa: PLC0415
    from kernelhub.layers import kernelize as binder  # noqa: PLC0415

    backend_of = Session().backend_of
    place = place_of(model, device, backend_of)
    if setting.flag("DISABLE_KERNEL_MAPPING"):
        return binder.unkernelize(model)
    chooser = Chooser(current_mapping(), place, served, fallback)
    binder.kernelize(
        model,
        KernelConfig.of_entries(chooser.entries(marked_layers(model))),
        mode=served,
        load=lambda choice, backend: choice.found,  # type: ignore[attr-defined]  # entries hold LoadedChoice only
        backend_of=backend_of,
        strict=KernelizeFallback.CANNOT_LOAD not in fallback,
    )
    return model


def _served(mode: Mode) -> ServedMode:
    if not isinstance(mode, Mode) or mode is Mode.FALLBACK:
        raise InvalidConfig(mode, "not a mode to run a model in", "Mode.INFERENCE or Mode.TRAINING")
    return mode.served


def _as_fallback(use_fallback: bool | KernelizeFallback) -> KernelizeFallback:
    if isinstance(use_fallback, KernelizeFallback):
        return use_fallback
    return KernelizeFallback.DEFAULT if use_fallback else KernelizeFallback.NONE
