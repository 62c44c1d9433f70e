"""Writes kernel repositories from dicts of files, laid out as `kernelhub.serve.LocalHub` serves them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def write_build(
    root: Path,
    repo_id: str,
    branch: str,
    variant: str,
    files: Mapping[str, str | bytes],
    *,
    name: str | None = None,
    version: int = 1,
    backend: str | None = None,
    archs: Sequence[str] | None = None,
    digest: bool = True,
    metadata_overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Write one build, with the metadata.json that fits its files, and return its folder.

    ``files`` maps paths inside the build to text or bytes. The variant tells the backend when none is given.
    An override replaces a key of the metadata; the value None removes it.
    """
    build = root / repo_id / branch / "build" / variant
    bodies = {path: body.encode() if isinstance(body, str) else body for path, body in files.items()}
    name = name or repo_id.rsplit("/", 1)[-1]
    metadata: dict[str, Any] = {
        "name": name,
        "id": _unique_id(name, repo_id, branch, variant, bodies),
        "version": version,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend or _backend(variant)} | ({"archs": list(archs)} if archs else {}),
        "digest": {"algorithm": "sha256", "files": _digests(bodies)} if digest else None,
    } | dict(metadata_overrides or {})
    kept = {key: value for key, value in metadata.items() if value is not None}
    for path, body in {"metadata.json": json.dumps(kept, indent=2).encode(), **bodies}.items():
        target = build / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(body)
    return build


def trust(root: Path, org: str, trusted: bool = True) -> Path:
    """Say in organization.json whether the Hub calls ``org`` a trusted kernel publisher."""
    target = root / org / "organization.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"trustedKernelPublisher": trusted}), encoding="utf-8")
    return target


def _digests(bodies: Mapping[str, bytes]) -> dict[str, str]:
    covered = sorted(path for path in bodies if path not in ("metadata.json", "metadata.json.sigstore"))
    return {path: base64.b64encode(hashlib.sha256(bodies[path]).digest()).decode() for path in covered}


def _unique_id(name: str, *parts: object) -> str:
    """A module name that no build with other contents, or of another repository, shares."""
    distinct = hashlib.sha256(repr(parts).encode()).hexdigest()[:7]
    return f"_{name.replace('-', '_')}_{distinct}"


def _backend(variant: str) -> str:
    """The backend type of a variant name, as the metadata of published builds spells it."""
    found = re.search(r"-(cpu|cuda|cu|rocm|xpu|cann|npu|metal|neuron|tpu)\d*(-|$)", variant)
    tag = found[1] if found else "cpu"
    return {"cu": "cuda", "npu": "cann"}.get(tag, tag)
