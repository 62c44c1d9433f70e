"""KernelConfig: which kernel serves which layer, per device and mode.

Accepted values for one layer name (hub-format section 6)::

    "org/repo:Symbol"                              any mapping string of request.py, with a symbol
    ("org/repo:Symbol", {"version": 2})            or {"revision": ...}; plus "trust_remote_code": bool or list
    {"cuda": <value>, "cpu": <value>, ...}         one value per device
    {"cuda": {"training": <value>, ...}, ...}      one value per device and mode
    "/abs/path:Symbol"                             a build folder on this machine
    "" or None                                     leave this layer alone

Building a config is pure: nothing is looked up, downloaded or imported until it is applied.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kernelhub.backend import backend_kind
from kernelhub.errors import InvalidBackend, InvalidConfig, InvalidRequest, did_you_mean
from kernelhub.mode import Mode
from kernelhub.request import KernelRequest, checked_repo_id

ACCEPTED_FORMS = (
    '"org/repo:Symbol", ("org/repo:Symbol", {"version": 2}), {"cuda": <value>, "cpu": <value>}, '
    '"/abs/path:Symbol", or "" to leave the layer alone'
)
ANY_DEVICE = ""

_LAYER_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PATH_PATTERN = re.compile(r"[A-Za-z0-9_*]+(?:\.[A-Za-z0-9_*]+)*", re.ASCII)
_OPTIONS = ("version", "revision", "trust_remote_code")
_MODE_NAMES = {mode.value: mode for mode in Mode}


@dataclass(frozen=True)
class KernelChoice:
    """One mapped kernel and the trust given with it; ``request.symbol`` is always set."""

    request: KernelRequest
    trust_remote_code: bool | tuple[str, ...] = False

    def __str__(self) -> str:
        return str(self.request)


@dataclass(frozen=True)
class LayerEntry:
    """The choices for one layer name or module path pattern.

    ``choices`` maps (backend name or ``ANY_DEVICE``, mode) to a choice; None means "leave this layer alone".
    """

    layer: str
    choices: tuple[tuple[tuple[str, Mode], KernelChoice | None], ...]

    @property
    def is_path(self) -> bool:
        """Is the key a module path pattern (``model.layers.*.mlp``) rather than a layer name?"""
        return _LAYER_NAME.fullmatch(self.layer) is None

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(device for (device, _), _ in self.choices))

    def choose(self, backend: str, mode: Mode) -> KernelChoice | None:
        """The kernel for a layer on ``backend`` in ``mode``; None leaves the layer alone."""
        table = dict(self.choices)
        device = backend if any(key[0] == backend for key in table) else ANY_DEVICE
        return next((table[device, step] for step in mode.lookup if (device, step) in table), None)


class KernelConfig:
    """An immutable mapping from layer names to kernels; usable on any number of models.

    Args:
        kernel_mapping: layer name (``"RMSNorm"``) or module path pattern (``"model.layers.*.mlp"``) to one of the
            accepted values, see the module's text.
        use_local_kernel: every string must be a path on this machine (as in transformers).
        inherit_mapping: extend the defaults of the place where the config is used, instead of replacing them.

    Raises:
        InvalidConfig: names the layer, the value and the accepted forms.

    Example:
        >>> KernelConfig({"RMSNorm": "kernels-community/liger-kernels@v3:LigerRMSNorm"})
        KernelConfig({'RMSNorm': 'kernels-community/liger-kernels@v3:LigerRMSNorm'})
    """

    __slots__ = ("_entries", "_inherit_mapping", "_use_local_kernel")
    _entries: tuple[LayerEntry, ...]
    _inherit_mapping: bool
    _use_local_kernel: bool

    def __init__(
        self,
        kernel_mapping: Mapping[str, Any] | None = None,
        use_local_kernel: bool = False,
        inherit_mapping: bool = True,
    ) -> None:
        mapping = {} if kernel_mapping is None else kernel_mapping
        if not isinstance(mapping, Mapping):
            raise InvalidConfig(mapping, f"a {type(mapping).__name__}", "a dict of layer name to kernel")
        entries = tuple(_read_entry(layer, value, use_local_kernel) for layer, value in mapping.items())
        object.__setattr__(self, "_entries", entries)
        object.__setattr__(self, "_use_local_kernel", bool(use_local_kernel))
        object.__setattr__(self, "_inherit_mapping", bool(inherit_mapping))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a KernelConfig is immutable; build a new one to change {name!r}")

    @property
    def entries(self) -> tuple[LayerEntry, ...]:
        return self._entries

    @property
    def use_local_kernel(self) -> bool:
        return self._use_local_kernel

    @property
    def inherit_mapping(self) -> bool:
        return self._inherit_mapping

    @property
    def kernel_mapping(self) -> dict[str, Any]:
        """The mapping in its plainest accepted form; ``KernelConfig(x.kernel_mapping) == x``."""
        return {entry.layer: _plain_entry(entry) for entry in self._entries}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON or TOML; ``from_dict`` reads it back."""
        return {
            "kernel_mapping": self.kernel_mapping,
            "use_local_kernel": self.use_local_kernel,
            "inherit_mapping": self.inherit_mapping,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KernelConfig:
        """The inverse of ``to_dict``.

        Raises:
            InvalidConfig: unknown keys or unreadable values.
        """
        known = ("kernel_mapping", "use_local_kernel", "inherit_mapping")
        if not isinstance(data, Mapping):
            raise InvalidConfig(data, f"a {type(data).__name__}", f"a dict with {', '.join(known)}")
        for key in data:
            if key not in known:
                raise InvalidConfig(key, f"unknown key{did_you_mean(str(key), known)}", f"one of {', '.join(known)}")
        return cls(**data)

    def choices(self) -> Iterator[KernelChoice]:
        """Every distinct kernel that this config may ask for, in order."""
        found = (choice for entry in self._entries for _, choice in entry.choices if choice is not None)
        return iter(dict.fromkeys(found))

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelConfig) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        local = ", use_local_kernel=True" if self._use_local_kernel else ""
        alone = "" if self._inherit_mapping else ", inherit_mapping=False"
        return f"KernelConfig({self.kernel_mapping!r}{local}{alone})"

    def __reduce__(self) -> tuple[Any, ...]:
        return KernelConfig, (self.kernel_mapping, self._use_local_kernel, self._inherit_mapping)

    def _identity(self) -> tuple[object, ...]:
        return frozenset(self._entries), self._use_local_kernel, self._inherit_mapping


def _read_entry(layer: object, value: object, local: bool) -> LayerEntry:
    if not isinstance(layer, str) or not (_LAYER_NAME.fullmatch(layer) or _PATH_PATTERN.fullmatch(layer)):
        expected = "a name such as 'RMSNorm' or a path such as 'model.layers.*.mlp'"
        raise InvalidConfig(layer, "not a layer name", expected)
    origin = f"layer {layer!r}"
    if isinstance(value, Mapping):
        choices = [pair for device, item in value.items() for pair in _read_device(device, item, local, origin)]
        if not choices:
            raise InvalidConfig(value, "names no kernel", ACCEPTED_FORMS, origin)
    else:
        choices = [((ANY_DEVICE, Mode.FALLBACK), _read_choice(value, local, origin))]
    _refuse_twice([key for key, _ in choices], value, origin)
    return LayerEntry(layer, tuple(choices))


def _read_device(
    device: object, value: object, local: bool, origin: str
) -> Iterator[tuple[tuple[str, Mode], KernelChoice | None]]:
    try:
        name = backend_kind(device).name if isinstance(device, str) else ""
    except InvalidBackend as error:
        raise InvalidConfig(device, f"device: {error.problem}", error.expected, origin) from None
    if not name:
        raise InvalidConfig(device, "device name is not a string", "a name such as 'cuda'", origin)
    if not isinstance(value, Mapping):
        yield (name, Mode.FALLBACK), _read_choice(value, local, origin)
        return
    for mode, item in value.items():
        yield (name, _read_mode(mode, origin)), _read_choice(item, local, origin)


def _read_mode(mode: object, origin: str) -> Mode:
    if isinstance(mode, Mode):
        return mode
    if mode not in _MODE_NAMES:
        raise InvalidConfig(mode, "unknown mode", f"one of {', '.join(_MODE_NAMES)}", origin)
    return _MODE_NAMES[str(mode)]


def _refuse_twice(keys: list[tuple[str, Mode]], value: object, origin: str) -> None:
    for key in keys:
        if keys.count(key) > 1:
            raise InvalidConfig(value, f"device {key[0]!r} given twice (aliases count)", "each device once", origin)


def _read_choice(value: object, local: bool, origin: str) -> KernelChoice | None:
    if value is None or value == "":
        return None
    options: Mapping[str, Any] = {}
    if isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[1], Mapping):
        value, options = value
    if not isinstance(value, str):
        raise InvalidConfig(value, f"a {type(value).__name__}", ACCEPTED_FORMS, origin)
    _check_options(options, origin)
    request = _read_request(value, options, origin)
    if local and request.path is None:
        raise InvalidConfig(value, "use_local_kernel=True needs a path", '"/abs/path:Symbol"', origin)
    return KernelChoice(request, _read_trust(options.get("trust_remote_code", False), origin))


def _read_request(value: str, options: Mapping[str, Any], origin: str) -> KernelRequest:
    try:
        request = KernelRequest.parse(value).at(version=options.get("version"), revision=options.get("revision"))
    except InvalidRequest as error:
        raise InvalidConfig(value, error.problem, error.expected or ACCEPTED_FORMS, origin) from None
    if request.symbol is None:
        raise InvalidConfig(value, "names no symbol", f'"{value}:Symbol"', origin)
    return request


def _check_options(options: Mapping[str, Any], origin: str) -> None:
    for key in options:
        if key not in _OPTIONS:
            problem = f"unknown option{did_you_mean(str(key), _OPTIONS)}"
            raise InvalidConfig(key, problem, f"one of {', '.join(_OPTIONS)}", origin)


def _read_trust(value: object, origin: str) -> bool | tuple[str, ...]:
    if isinstance(value, bool):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_read_trusted(repo, origin) for repo in value)
    raise InvalidConfig(value, "trust_remote_code", "True, False or a list of repositories", origin)


def _read_trusted(repo: Any, origin: str) -> str:
    try:
        return checked_repo_id(repo)
    except InvalidRequest as error:
        raise InvalidConfig(repo, f"trust_remote_code: {error.problem}", "org/name", origin) from None


def _plain_entry(entry: LayerEntry) -> Any:
    nested: dict[str, dict[str, Any]] = {}
    for (device, mode), choice in entry.choices:
        nested.setdefault(device, {})[mode.value] = _plain_choice(choice)
    plain = {
        device: modes[Mode.FALLBACK.value] if set(modes) == {Mode.FALLBACK.value} else modes
        for device, modes in nested.items()
    }
    return plain.get(ANY_DEVICE, plain)


def _plain_choice(choice: KernelChoice | None) -> Any:
    if choice is None:
        return ""
    trust = choice.trust_remote_code
    options = {"trust_remote_code": list(trust) if isinstance(trust, tuple) else trust}
    return (str(choice.request), options) if trust else str(choice.request)
