"""``kernelhub doctor``: everything about this machine that explains a failure, fit to be pasted into a bug report."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

import kernelhub
from kernelhub import setting
from kernelhub.cli import option
from kernelhub.cli.trust_root import facts_of
from kernelhub.errors import KernelHubError
from kernelhub.explanation import explain
from kernelhub.host import this_host
from kernelhub.request import KernelRequest
from kernelhub.trustroot import TrustRoot

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernelhub.session import Session

_PACKAGES = (
    *("torch", "triton", "transformers", "huggingface_hub", "safetensors", "apache-tvm-ffi", "einops", "sigstore"),
    "kernels",
)
_OURS = ("KERNELHUB_", "KERNELS_", "HF_", "HUGGING", "TRANSFORMERS_OFFLINE", "LOCAL_KERNELS", "DISABLE_KERNEL")
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|KEY", re.IGNORECASE)
_SECRETS = ((re.compile(r"hf_[A-Za-z0-9]{4,}"), "hf_***"), (re.compile(r"(?<=//)[^/@\s]+@"), "***@"))
_LOCAL = ("localhost", "127.0.0.1", "::1")
_SECONDS = 5.0
_CHECK_SECONDS = 300.0


def doctor(
    requests: Annotated[list[str] | None, typer.Argument(help="Mapping strings to give a verdict for.")] = None,
    cache_dir: option.CacheDir = None,
    offline: option.Offline = False,
    numerics: Annotated[bool, typer.Option("--check/--no-check", help="Check the shipped kernels here.")] = True,
    as_json: option.AsJson = False,
) -> None:
    """Describe this machine and what kernelhub would do on it; secrets and the home folder are masked.

    The kernels shipped with kernelhub are compared with plain layers, in a process of their own; those of REQUESTS are
    not imported. Exit code 1 if something is broken: the store, the endpoint, a shipped kernel, or no usable build for
    one of REQUESTS.
    """
    session = option.open_session(None, cache_dir, offline)
    found = {
        "kernelhub": _told(_versions),
        "environment": _told(lambda: _environment(session)),
        "store": _told(lambda: _store(session)),
        "endpoint": _told(lambda: _endpoint(session)),
        "policy": _told(lambda: _policy(session)),
        "signatures": _told(lambda: _signatures(session)),
        "numerics": _told(_numerics) if numerics else {},
        "settings": _settings(),
        "requests": {request: _told(partial(_verdict, request, session)) for request in requests or ()},
    }
    masked = _masked(found)
    typer.echo(json.dumps(masked, indent=2) if as_json else "\n".join(_lines(masked)))
    sections = [*found.values(), *found["requests"].values()]
    if any("problem" in section for section in sections):
        raise typer.Exit(1)


def _told(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The answer; what cannot be answered is itself a finding, and no reason to be silent about the rest."""
    try:
        return ask()
    except (KernelHubError, OSError) as error:
        return {"problem": f"{type(error).__name__}: {error}"}


def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {"kernelhub": kernelhub.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _environment(session: Session) -> dict[str, Any]:
    detected = session.detected
    found = {
        "environment": str(detected),
        "platform": platform.platform(),
        "torch": detected.torch_build or None,
        "gpus": [f"{gpu.name} ({gpu.arch})" for gpu in detected.gpus],
        "notes": list(detected.notes),
    }
    if sys.platform == "linux":
        host = this_host()
        versions = host.versions.get("libstdc++.so.6", frozenset())
        numbered = [tuple(map(int, part)) for version in versions if (part := _numbers(version))]
        found["glibc"] = str(host.glibc()) if host.glibc() else None
        found["libstdc++"] = host.places.get("libstdc++.so.6")
        found["newest GLIBCXX"] = ".".join(map(str, max(numbered, default=())))
        found["nvidia driver"] = _driver()
    return found


def _numbers(version: str) -> list[str]:
    match = re.fullmatch(r"GLIBCXX_([0-9]+(?:\.[0-9]+)*)", version)
    return match[1].split(".") if match else []


def _driver() -> str | None:
    try:
        first = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return None
    return first.partition(":")[2].strip()


def _store(session: Session) -> dict[str, Any]:
    store = session.store
    builds = list(store.builds())
    place = next(path for path in (store.root, *store.root.parents) if path.exists())
    found = {
        "folder": str(store.root),
        "exists": store.root.is_dir(),
        "writable": os.access(place, os.W_OK),
        "builds": len(builds),
        "bytes": sum(build.manifest.size for build in builds),
        "free bytes": shutil.disk_usage(place).free,
    }
    return found if place.is_dir() else {**found, "problem": "not a folder"}


def _endpoint(session: Session) -> dict[str, Any]:
    address = session.store.endpoint
    token = _token()
    found: dict[str, Any] = {"address": address, "token": "there is one" if token else "none"}
    if setting.offline() if session.offline is None else session.offline:
        return {**found, "reachable": "not asked, as kernelhub is offline"}
    status, told = _ask(address, None)
    found["reachable"] = told
    if status == 0:
        return {**found, "problem": f"{address} cannot be reached: {told}"}
    if token:
        found["token"] = _judge_token(address, token)
    return found


def _token() -> str | None:
    """The access token that huggingface_hub would use: the same variables, then the same file."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name):
            return os.environ[name].strip()
    path = Path(os.environ.get("HF_TOKEN_PATH") or setting.hf_home() / "token").expanduser()
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def _judge_token(address: str, token: str) -> str:
    parts = urlsplit(address)
    if parts.scheme != "https" and parts.hostname not in _LOCAL:
        return "there is one; not sent, as the address is not https"
    status, told = _ask(f"{address}/api/whoami-v2", token)
    return {200: "accepted", 401: "refused (401): log in again with `hf auth login`"}.get(status, told)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A token is for the address that was named, never for where that one points."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _ask(address: str, token: str | None) -> tuple[int, str]:
    """The status of an answer and what to say of it; 0 for none. Only http and https are asked."""
    if urlsplit(address).scheme not in ("http", "https"):
        return 0, "not an http address"
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"} if token else {})
    start = time.perf_counter()
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=_SECONDS) as answer:
            status = int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        status = error.code
    except (OSError, ValueError) as error:
        return 0, str(error)
    return status, f"answered {status} in {(time.perf_counter() - start) * 1e3:.0f} ms"


def _policy(session: Session) -> dict[str, Any]:
    policy, lock = session.policy, session.lock
    return {
        "policy file": policy.origin or None,
        "trusted publishers": sorted(policy.publishers),
        "trusted repositories": sorted(policy.repositories),
        "nothing else": policy.only,
        "pins": len(policy.pins),
        "signatures": dict(policy.signatures),
        "digests": dict(policy.digests),
        "signers": {publisher: str(identity) for publisher, identity in policy.identities.items()},
        "older builds": sorted(policy.older),
        "lock file": None if lock is None else str(session.lockfile or setting.lock_path()),
        "strict": session.is_strict,
    }


def _signatures(session: Session) -> dict[str, Any]:
    """The trust root, which is a problem only for who has signatures checked."""
    policy = session.policy
    found = facts_of(TrustRoot.in_use(policy), policy)
    problem = found.pop("problem")
    if not problem:
        return {**found, "checked": True}
    looked_at = set(policy.signatures.values()) - {"off"}
    return {**found, "problem": problem} if looked_at else {**found, "checked": False, "because": problem}


def _numerics() -> dict[str, Any]:
    """Whether the shipped kernels are right on this machine; in another process, which may die of them."""
    if importlib.util.find_spec("torch") is None:
        return {"checked": "not asked, as torch is not installed"}
    command = [sys.executable, "-m", "kernelhub", "check", "--offline", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False)
        report = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"problem": f"checking the shipped kernels took more than {_CHECK_SECONDS:.0f} s"}
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return {"problem": f"the shipped kernels could not be checked: {last[0]}"}
    rows = report["rows"]
    wrong = [f"{row['kernel']} ({row['mode']}): {row['problem']}" for row in rows if row["verdict"] != "right"]
    found = {"checked": f"{len(rows) - len(wrong)} of {len(rows)} right, in {report['seconds']:.1f} s"}
    return {**found, "problem": "; ".join(wrong)} if wrong else found


def _settings() -> dict[str, Any]:
    """Variables that change what happens; the values of secrets are not even looked at."""
    names = sorted(name for name in os.environ if name.startswith(_OURS))
    return {name: "***" if _SECRET_NAME.search(name) else os.environ[name] for name in names}


def _verdict(text: str, session: Session) -> dict[str, Any]:
    told = explain(KernelRequest.parse(text), session)
    found: dict[str, Any] = {"verdict": told.verdict, "trust": told.trust}
    if told.resolution is None:
        return {**found, "problem": told.problem or told.verdict}
    if not told.trusted:
        found["problem"] = f"not trusted: {told.trust}"
    refused = told.libraries.refused if told.libraries else None
    if refused is not None:
        found["problem"] = f"{refused.path}: {'; '.join(refused.reasons)}. {told.advice}".strip()
    facts = {"build": told.resolution.build, "signature": told.signature, "notes": list(told.resolution.notes)}
    return {**found, **facts}


def _masked(value: Any) -> Any:
    """The same without secrets and without the user's home folder."""
    if isinstance(value, dict):
        return {_masked(key): _masked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_masked(item) for item in value]
    if not isinstance(value, str):
        return value
    for pattern, mask in _SECRETS:
        value = pattern.sub(mask, value)
    for home in {os.path.expanduser("~"), os.path.realpath(os.path.expanduser("~"))}:  # noqa: PTH111  # never raises
        if len(home) > 1 and home != "~":
            value = re.sub(rf"{re.escape(home)}(?=/|\b|$)", "~", value)
    return value


def _lines(found: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in found.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}", *_lines(value, f"{indent}  ")] if value else []
        elif value not in (None, []):
            shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            lines.append(f"{indent}{name}: " + shown.replace("\n", f"\n{indent}    "))
    return lines
