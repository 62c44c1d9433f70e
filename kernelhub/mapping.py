"""Mapping: the values that a user writes for layers, read into entries and written back. ``config`` lists the forms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kernelhub.capability import DeviceRange
from kernelhub.entry import ANY_DEVICE, KernelChoice, LayerEntry, is_layer_name
from kernelhub.errors import InvalidBackend, InvalidConfig, InvalidRequest, did_you_mean
from kernelhub.fusion import Fusion
from kernelhub.mode import Mode
from kernelhub.request import KernelRequest, checked_repo_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ACCEPTED_FORMS = (
    '"org/repo:Symbol", ("org/repo:Symbol", {"version": 2}), {"cuda": <value>, "cpu": <value>}, '
    '"/abs/path:Symbol", a list of these as candidates, or "" to leave the layer alone'
)

_PATH_PATTERN = re.compile(r"[A-Za-z0-9_*]+(?:\.[A-Za-z0-9_*]+)*", re.ASCII)
_OPTIONS = ("version", "revision", "trust_remote_code", "attributes", "optional")
_MODE_NAMES = {mode.value: mode for mode in Mode}


def read_entry(layer: object, value: object, local: bool) -> LayerEntry:
    """The entry that a key and its value mean; ``local``: every string has to be a path on this machine.

    Raises:
        InvalidConfig: names the layer, the value and the accepted forms.
    """
    name, fusion = _read_key(layer)
    origin = f"layer {name!r}"
    if isinstance(value, Mapping):
        choices = [pair for device, item in value.items() for pair in _read_device(device, item, local, origin)]
        if not choices:
            raise InvalidConfig(value, "names no kernel", ACCEPTED_FORMS, origin)
    else:
        choices = [((ANY_DEVICE, Mode.FALLBACK), _read_choice(value, local, origin))]
    _refuse_twice([key for key, _ in choices], value, origin)
    return LayerEntry(name, tuple(choices), fusion)


def _read_key(key: object) -> tuple[str, Fusion | None]:
    if isinstance(key, tuple) or (isinstance(key, str) and Fusion.is_text(key)):
        fusion = Fusion.of(key) if isinstance(key, tuple) else Fusion.parse(key)
        return str(fusion), fusion
    if not isinstance(key, str) or not (is_layer_name(key) or _PATH_PATTERN.fullmatch(key)):
        expected = "a name such as 'RMSNorm' or a path such as 'model.layers.*.mlp'"
        raise InvalidConfig(key, "not a layer name", expected)
    return key, None


def refuse_again(entries: Sequence[LayerEntry]) -> None:
    """One fusion can be spelled in two ways; other keys of a dict differ."""
    layers = [entry.layer for entry in entries]
    again = next((layer for layer in layers if layers.count(layer) > 1), None)
    if again is not None:
        raise InvalidConfig(again, "a fusion given twice", "each key once")


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
    elif isinstance(value, list) and len(value) > 1:
        return _read_candidates(value, local, origin)
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


def _read_candidates(values: list[Any], local: bool, origin: str) -> KernelChoice:
    first, *others = [_read_choice(value, local, origin) for value in values]
    if first is None or None in others or any(each.others for each in (first, *others) if each is not None):
        raise InvalidConfig(values, "a candidate that is no kernel", ACCEPTED_FORMS, origin)
    return replace(first, others=tuple(each for each in others if each is not None))


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


def plain_entry(entry: LayerEntry) -> Any:
    """The value of an entry in its plainest accepted form."""
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
    if choice.others:
        return [_plain_choice(candidate) for candidate in choice.candidates]
    trust = choice.trust_remote_code
    options = {
        "trust_remote_code": list(trust) if isinstance(trust, tuple) else trust,
        "attributes": dict(choice.attributes),
        "optional": choice.optional,
    }
    given = {name: value for name, value in options.items() if value}
    return (str(choice.request), given) if given else str(choice.request)
