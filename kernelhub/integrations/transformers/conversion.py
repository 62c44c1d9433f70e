"""Conversion between our KernelConfig and the one of transformers, in both directions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import transformers

from kernelhub.config import ANY_DEVICE, KernelConfig
from kernelhub.errors import InvalidConfig
from kernelhub.integrations.kernels.layer.mode import Mode as FlagMode
from kernelhub.mode import Mode
from kernelhub.revision import RevisionKind

if TYPE_CHECKING:
    from kernelhub.config import KernelChoice, LayerEntry

_PLAIN = "one Hub kernel or local path for a layer name or fusion, without attributes or optional"
_VERSION_OF_PLAIN_STRINGS = 1


def from_transformers(config: transformers.KernelConfig) -> KernelConfig:
    """Our config for one of transformers, as its user wrote it or after transformers resolved it for a model.

    Raises:
        InvalidConfig: a value that cannot be read; names the layer.
    """
    local, inherit = bool(config.use_local_kernel), bool(config.inherit_mapping)
    return KernelConfig({layer: ours(value) for layer, value in config.kernel_mapping.items()}, local, inherit)


def to_transformers(config: KernelConfig) -> transformers.KernelConfig:
    """transformers' config for one of ours; ``from_transformers`` reads it back.

    Its devices, too, can have one kernel each.

    Raises:
        InvalidConfig: an entry that transformers has no words for: a path pattern, a kernel per mode or capability, a
            range of versions, a builtin kernel, ``attributes``, ``optional``. Such configs are taken everywhere as
            they are while the integration is on.
    """
    mapping = {key_of(entry): theirs(entry, config.use_local_kernel) for entry in config.entries}
    local, inherit = config.use_local_kernel, config.inherit_mapping
    return transformers.KernelConfig(mapping, local, inherit)  # type: ignore[no-untyped-call]


def with_trust(config: KernelConfig, trust: bool) -> KernelConfig:
    """The config with the same word about trust for all its kernels."""

    def said(entry: LayerEntry) -> LayerEntry:
        choices = ((at, choice and replace(choice, trust_remote_code=trust)) for at, choice in entry.choices)
        return replace(entry, choices=tuple(choices))

    mapping = KernelConfig.of_entries(map(said, config.entries)).kernel_mapping
    return KernelConfig(mapping, config.use_local_kernel, config.inherit_mapping)


def ours(value: Any) -> Any:
    """A value of a mapping of transformers in our terms; ``KernelConfig`` checks it."""
    return {device: _per_mode(each) for device, each in value.items()} if isinstance(value, dict) else written(value)


def key_of(entry: LayerEntry) -> Any:
    """The key of a mapping of transformers for an entry."""
    if entry.fusion is None:
        return entry.layer
    return tuple(
        (member.name, ".".join(filter(None, (member.parent, member.child)))) for member in entry.fusion.members
    )


def theirs(entry: LayerEntry, local: bool = False) -> Any:
    """The value of a mapping of transformers for an entry. Raises InvalidConfig as ``to_transformers`` does."""
    if entry.is_path and entry.fusion is None:
        raise InvalidConfig(entry.layer, "a path pattern", _PLAIN)
    values: dict[str, Any] = {}
    for (device, mode), choice in entry.choices:
        if mode is not Mode.FALLBACK or entry.has_ranges:
            raise InvalidConfig(entry.layer, "a kernel for some modes or capabilities only", _PLAIN)
        values[device] = plain(choice, entry.layer, local)
    return values.get(ANY_DEVICE, values)


def plain(choice: KernelChoice | None, layer: str, local: bool) -> Any:
    """One kernel as transformers writes it: text, or text and a dict with its version or revision, and trust."""
    if choice is None:
        return ""
    request = choice.request
    if request.is_builtin or choice.attributes or choice.optional or (request.path is not None) is not local:
        raise InvalidConfig(str(request), f"layer {layer!r}", _PLAIN)
    text = f"{request.name}:{request.symbol}"
    given = _revision(choice, layer)
    if choice.trust_remote_code:
        given = {**(given or {"version": _VERSION_OF_PLAIN_STRINGS}), "trust_remote_code": choice.trust_remote_code}
    return (text, given) if given else text


def _revision(choice: KernelChoice, layer: str) -> dict[str, Any]:
    revision = choice.request.revision
    if revision is None:
        return {}
    if revision.kind is RevisionKind.VERSION:
        return {"version": revision.number}
    if revision.kind in (RevisionKind.NAME, RevisionKind.COMMIT):
        return {"revision": revision.text}
    raise InvalidConfig(str(choice.request), f"layer {layer!r}", _PLAIN)


def _per_mode(value: Any) -> Any:
    return (
        {_mode_name(mode): written(each) for mode, each in value.items()} if isinstance(value, dict) else written(value)
    )


def _mode_name(mode: Any) -> Any:
    """The name of our mode for one of `kernels`, whose modes are flags; others stay as they are."""
    return mode.served.value if isinstance(mode, FlagMode) else mode


def written(value: Any) -> Any:
    """A repository of `kernels` as text and options; others stay as they are."""
    return getattr(value, "mapped", value)
