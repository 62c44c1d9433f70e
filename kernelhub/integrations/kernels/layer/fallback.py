"""KernelizeFallback: when a layer may keep its own forward instead of raising an error."""

from __future__ import annotations

from enum import Flag, auto


class KernelizeFallback(Flag):
    """Cases in which ``kernelize`` leaves a layer as it is.

    - ``NONE``: in no case.
    - ``NO_LAYER``: nothing is mapped to the name of the layer.
    - ``NO_DEVICE``: nothing is mapped for the type of device.
    - ``NO_COMPATIBLE_PROPERTIES``: nothing is mapped for a device with these properties.
    - ``NO_COMPATIBLE_MODE``: nothing is mapped for the mode, or the kernel does not support it.
    - ``CANNOT_LOAD``: there is no build for this machine, or, offline, none in the store; or the kernel does not fit
      the layer. What is untrusted or damaged is an error in every case.
    - ``DEFAULT``: the four first cases.  ``ALL``: all five.
    """

    NONE = 0
    NO_LAYER = auto()
    NO_DEVICE = auto()
    NO_COMPATIBLE_PROPERTIES = auto()
    NO_COMPATIBLE_MODE = auto()
    CANNOT_LOAD = auto()

    DEFAULT = NO_LAYER | NO_DEVICE | NO_COMPATIBLE_PROPERTIES | NO_COMPATIBLE_MODE
    ALL = DEFAULT | CANNOT_LOAD
