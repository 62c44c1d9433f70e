"""KernelConfig: which kernel serves which layer, per device and mode.

Accepted values for one layer name (hub-format section 6)::

    "org/repo:Symbol"                              any mapping string of request.py, with a symbol
    ("org/repo:Symbol", {"version": 2})            or {"revision": ...}; more options below
    {"cuda": <value>, "cpu": <value>, ...}         one value per device
    {"cuda>=9.0,<10": <value>, "cuda": <value>}    per range of compute capability: the narrowest that holds it wins
    {"cuda": {"training": <value>, ...}, ...}      one value per device and mode
    "/abs/path:Symbol"                             a build folder on this machine
    ["org/a:Symbol", "org/b:Symbol"]               candidates: the first, or with select="fastest" the fastest of them
    "" or None                                     leave this layer alone

A key is a layer name, a module path pattern, or a fusion of several layers (``fusion.py``).

Options of a value, besides ``version`` and ``revision``: ``trust_remote_code`` (bool or list of repositories);
``attributes`` ({"variance_epsilon": "eps"}: the kernel's name of an attribute and the layer's own);
``optional`` (True: not an error when the model has no such layer or the kernel does not fit it).

Building a config is pure: nothing is looked up, downloaded or imported until it is applied.

The same in a file, read by ``KernelConfig.from_file``; TOML, or JSON of the same shape::

    [kernel_mapping]
    RMSNorm = "org/repo:Norm"
    SwiGLUMLP = ["org/repo:MLP", {version = 2}]
    rotary_pos_emb = {cuda = "org/repo:rope", cpu = ""}
    "RMSNorm=model.layers.*.post_attention_layernorm + MLP=model.layers.*.mlp" = "org/repo:RMSNormMLP"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelhub.document import read_document
from kernelhub.entry import ANY_DEVICE, KernelChoice, LayerEntry
from kernelhub.errors import InvalidConfig, did_you_mean
from kernelhub.liger import DEFAULT_SOURCE, liger_mapping
from kernelhub.mapping import plain_entry, read_entry, refuse_again

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = ["ANY_DEVICE", "KernelChoice", "KernelConfig", "LayerEntry"]


class KernelConfig:
    """An immutable mapping from layer names to kernels; usable on any number of models.

    Args:
        kernel_mapping: layer name (``"RMSNorm"``), module path pattern (``"model.layers.*.mlp"``) or fusion to one of
            the accepted values, see the module's text.
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
        kernel_mapping: Mapping[Any, Any] | None = None,
        use_local_kernel: bool = False,
        inherit_mapping: bool = True,
    ) -> None:
        mapping = {} if kernel_mapping is None else kernel_mapping
        if not isinstance(mapping, Mapping):
            raise InvalidConfig(mapping, f"a {type(mapping).__name__}", "a dict of layer name to kernel")
        entries = tuple(read_entry(layer, value, use_local_kernel) for layer, value in mapping.items())
        refuse_again(entries)
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
        return {entry.layer: plain_entry(entry) for entry in self._entries}

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
    def of_entries(cls, entries: Iterable[LayerEntry]) -> KernelConfig:
        """A config of entries that were made elsewhere, each for another layer."""
        config = cls()
        object.__setattr__(config, "_entries", tuple(entries))
        return config

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
        given = (choice for entry in self._entries for _, choice in entry.choices if choice is not None)
        return iter(dict.fromkeys(candidate for choice in given for candidate in choice.candidates))

    def candidates(self) -> tuple[KernelConfig, ...]:
        """This config with the first candidate of every entry alone, with the second of those that have one, ..."""
        parts: list[KernelConfig] = []
        while part := [entry for each in self._entries if (entry := each.candidate(len(parts)))]:
            parts.append(KernelConfig.of_entries(part))
        return tuple(parts) or (self,)

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
