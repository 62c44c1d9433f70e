"""KernelConfig: which kernel serves which layer, per device and mode.

Accepted values for one layer name (hub-format section 6)::

    "org/repo:Symbol"                              any mapping string of request.py, with a symbol
    ("org/repo:Symbol", {"version": 2})            or {"revision": ...}; more options below
    {"cuda": <value>, "cpu": <value>, ...}         one value per device
    {"cuda>=9.0,<10": <value>, "cuda": <value>}    per range of compute capability: the narrowest that holds it wins
    {"cuda": {"training": <value>, ...}, ...}      one value per device and mode
    "/abs/path:Symbol"                             a build folder on this machine
    "" or None                                     leave this layer alone

Options of a value, besides ``version`` and ``revision``: ``trust_remote_code`` (bool or list of repositories);
``attributes`` ({"variance_epsilon": "eps"}: the kernel's name of an attribute and the layer's own);
``optional`` (True: not an error when the model has no such layer or the kernel does not fit it).

Building a config is pure: nothing is looked up, downloaded or imported until it is applied.

The same in a file, read by ``KernelConfig.from_file``; TOML, or JSON of the same shape::

    [kernel_mapping]
    RMSNorm = "org/repo:Norm"
    SwiGLUMLP = ["org/repo:MLP", {version = 2}]
    rotary_pos_emb = {cuda = "org/repo:rope", cpu = ""}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernelhub.capability import DeviceRange, device_range
from kernelhub.document import read_document
from kernelhub.errors import InvalidBackend, InvalidConfig, InvalidRequest, did_you_mean
from kernelhub.liger import DEFAULT_SOURCE, liger_mapping
from kernelhub.mode import Mode
from kernelhub.request import KernelRequest, checked_repo_id

if TYPE_CHECKING:
    from pathlib import Path

    from kernelhub.backend import Release

ACCEPTED_FORMS = (
    '"org/repo:Symbol", ("org/repo:Symbol", {"version": 2}), {"cuda": <value>, "cpu": <value>}, '
    '"/abs/path:Symbol", or "" to leave the layer alone'
)
ANY_DEVICE = ""

_LAYER_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PATH_PATTERN = re.compile(r"[A-Za-z0-9_*]+(?:\.[A-Za-z0-9_*]+)*", re.ASCII)
_OPTIONS = ("version", "revision", "trust_remote_code", "attributes", "optional")
_MODE_NAMES = {mode.value: mode for mode in Mode}


@dataclass(frozen=True)
class KernelChoice:
    """One mapped kernel and the options given with it; ``request.symbol`` is always set.

    ``attributes`` are pairs: an attribute's name in the kernel, and its name in the layers of the model.
    """

    request: KernelRequest
    trust_remote_code: bool | tuple[str, ...] = False
    attributes: tuple[tuple[str, str], ...] = ()
    optional: bool = False

    def __str__(self) -> str:
        return str(self.request)


@dataclass(frozen=True)
class LayerEntry:
    """The choices for one layer name or module path pattern.

    ``choices`` maps (device key or ``ANY_DEVICE``, mode) to a choice; None means "leave this layer alone". A device key
    is the text of a ``DeviceRange``.
    """

    layer: str
    choices: tuple[tuple[tuple[str, Mode], KernelChoice | None], ...]

    @property
    def is_path(self) -> bool:
        """Is the key a module path pattern (``model.layers.*.mlp``) rather than a layer name?"""
        return _LAYER_NAME.fullmatch(self.layer) is None

    @property
    def is_optional(self) -> bool:
        """May a model have no such layer?"""
        given = [choice for _, choice in self.choices if choice is not None]
        return bool(given) and all(choice.optional for choice in given)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(device for (device, _), _ in self.choices))

    @property
    def has_ranges(self) -> bool:
        return any(device and device_range(device).is_range for device in self.devices)

    def devices_for(self, backend: str, capability: Release | None = None) -> tuple[str, ...]:
        """The device keys that hold a device, the narrowest first."""
        if self.devices == (ANY_DEVICE,):
            return self.devices
        holding = (device for device in self.devices if device_range(device).holds(backend, capability))
        return tuple(sorted(holding, key=lambda device: device_range(device).width))

    def find(
        self, backend: str, mode: Mode, capability: Release | None = None
    ) -> tuple[KernelChoice | None] | tuple[()]:
        """The choice for a device in a mode, in a tuple; empty when the entry has none."""
        table = dict(self.choices)
        for device in self.devices_for(backend, capability):
            for step in mode.lookup:
                if (device, step) in table:
                    return (table[device, step],)
        return ()

    def choose(self, backend: str, mode: Mode, capability: Release | None = None) -> KernelChoice | None:
        """The kernel for a layer on ``backend`` in ``mode``; None leaves the layer alone."""
        return next(iter(self.find(backend, mode, capability)), None)


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

    @classmethod
    def from_file(cls, path: Path) -> KernelConfig:
        """Read a ``.toml`` or ``.json`` file with ``kernel_mapping``, and ``use_local_kernel`` or ``inherit_mapping``.

        The file is the user's own configuration: what it says under ``trust_remote_code`` counts, as in code.

        Raises:
            InvalidConfig: it cannot be read, or what is wrong in it; names the file and the key.
        """
        document = read_document(path)
        for key in ("use_local_kernel", "inherit_mapping"):
            if not isinstance(document.get(key, False), bool):
                raise InvalidConfig(document[key], f"key {key!r}", "true or false", str(path))
        if "kernel_mapping" not in document:
            found = f" among {', '.join(map(ascii, document))}" if document else ""
            raise InvalidConfig(str(path), f"no key 'kernel_mapping'{found}", "a table [kernel_mapping]")
        if document["kernel_mapping"] is None:
            raise InvalidConfig(None, "key 'kernel_mapping'", "layer names and kernels", str(path))
        try:
            return cls.from_dict(document)
        except InvalidConfig as error:
            where = f"{path}, {error.origin}" if error.origin else str(path)
            raise InvalidConfig(error.value, error.problem, error.expected, where) from None

    @classmethod
    def from_liger(
        cls,
        *,
        rope: bool | None = None,
        rms_norm: bool | None = None,
        swiglu: bool | None = None,
        geglu: bool | None = None,
        layer_norm: bool | None = None,
        cross_entropy: bool | None = None,
        fused_linear_cross_entropy: bool | None = None,
        source: str = DEFAULT_SOURCE,
        **unknown: object,
    ) -> KernelConfig:
        """The config that the switches of Liger Kernel mean; ``liger.py`` has the table.

        Without a value a switch has Liger's default, and its layers are optional: all on, but ``layer_norm`` and
        ``cross_entropy``; with ``cross_entropy=True`` the fused loss is off.

        Args:
            source: the Hub repository with Liger's layers, or ``"builtin"`` for those shipped with kernelhub.

        Raises:
            InvalidConfig: an unknown switch, a value that is not True or False, or two that exclude each other.

        Example:
            >>> config = KernelConfig.from_liger(rope=True, swiglu=True, source="builtin")
            >>> config.kernel_mapping["SwiGLUMLP"]
            'builtin:SwiGLUMLP'
        """
        switches = {
            "rope": rope,
            "rms_norm": rms_norm,
            "swiglu": swiglu,
            "geglu": geglu,
            "layer_norm": layer_norm,
            "cross_entropy": cross_entropy,
            "fused_linear_cross_entropy": fused_linear_cross_entropy,
        }
        return cls(liger_mapping({**switches, **unknown}, source))

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
        name = str(DeviceRange.of(device))
    except InvalidBackend as error:
        raise InvalidConfig(device, f"device: {error.problem}", error.expected, origin) from None
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
    return KernelChoice(
        request,
        _read_trust(options.get("trust_remote_code", False), origin),
        _read_attributes(options.get("attributes", {}), origin),
        _read_optional(options.get("optional", False), origin),
    )


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


def _read_attributes(value: object, origin: str) -> tuple[tuple[str, str], ...]:
    names = [name for pair in value.items() for name in pair] if isinstance(value, Mapping) else [value]
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            expected = 'names of attributes, such as {"variance_epsilon": "eps"}'
            raise InvalidConfig(value, "attributes", expected, origin)
    return tuple(sorted(value.items())) if isinstance(value, Mapping) else ()


def _read_optional(value: object, origin: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidConfig(value, "optional", "True or False", origin)
    return value


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
    options = {
        "trust_remote_code": list(trust) if isinstance(trust, tuple) else trust,
        "attributes": dict(choice.attributes),
        "optional": choice.optional,
    }
    given = {name: value for name, value in options.items() if value}
    return (str(choice.request), given) if given else str(choice.request)
