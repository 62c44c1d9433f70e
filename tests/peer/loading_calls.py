"""Calls that load, look for, or install kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Call = Callable[[Any, dict[str, Any]], Any]

MANY = "acme/many"


def value(*arguments: Any, **keywords: Any) -> Call:
    """``get_kernel(...).VALUE``"""
    return lambda api, facts: api.get_kernel(*arguments, **keywords).VALUE


def has(*arguments: Any, **keywords: Any) -> Call:
    return lambda api, facts: api.has_kernel(*arguments, **keywords)


def installed(*arguments: Any, **keywords: Any) -> Call:
    """The name of the folder that ``install_kernel`` returns, and what is in it."""

    def install(api: Any, facts: dict[str, Any]) -> Any:
        folder = api.install_kernel(*arguments, **keywords)
        return [folder.name, sorted(path.name for path in folder.iterdir())]

    return install


def variants(*arguments: Any, **keywords: Any) -> Call:
    """The builds that are accepted, in order, and those that are rejected, sorted."""

    def decide(api: Any, facts: dict[str, Any]) -> Any:
        decisions = api.get_kernel_variants(*arguments, **keywords)
        accepted = [each.variant.variant_str for each in decisions if isinstance(each, api.VariantAccepted)]
        rejected = [each for each in decisions if isinstance(each, api.VariantRejected)]
        assert all(each.reason for each in rejected)
        return [accepted, sorted(each.variant.variant_str for each in rejected)]

    return decide


def local(name: str, below: str = "", **keywords: Any) -> Call:
    """``get_local_kernel(...).VALUE`` for a folder of the published repositories."""
    return lambda api, facts: api.get_local_kernel(Path(facts["root"], name, "v1", below), **keywords).VALUE


def locked(repo_id: str, lock: str, **keywords: Any) -> Call:
    return lambda api, facts: api.get_locked_kernel(repo_id, lockfile=Path(facts[lock]), **keywords).VALUE


def from_lock(repo_id: str, lock: str, **keywords: Any) -> Call:
    return lambda api, facts: api.load_kernel(repo_id, lockfile=Path(facts[lock]), **keywords).VALUE


def loaded(api: Any, facts: dict[str, Any]) -> Any:
    """What is known about one of the kernels that were loaded."""
    kernels = [each for each in api.get_loaded_kernels() if each.repo_info and str(each.metadata.name) == "user"]
    found = kernels[0]
    return [found.repo_info.repo_id, len(found.repo_info.revision), found.metadata.version, found.module.VALUE]


CALLS: dict[str, Call] = {
    "get a version": value("acme/relu", version=1),
    "get another version": value("acme/relu", version=2),
    "get the branch of a version": value("acme/relu", revision="v1"),
    "get main": value("acme/relu", revision="main"),
    "get a commit": lambda api, facts: api.get_kernel("acme/relu", revision=facts["commits"]["acme/relu"]).VALUE,
    "get it twice": lambda api, facts: api.get_kernel("acme/relu", version=1) is api.get_kernel("acme/relu", version=1),
    "get a layers module": lambda api, facts: api.get_kernel("acme/relu", version=1).layers.Relu.__name__,
    "get version and revision": value("acme/relu", version=1, revision="main"),
    "get neither": value("acme/relu"),
    "get a missing version": value("acme/relu", version=9),
    "get a missing revision": value("acme/relu", revision="nope"),
    "get a negative version": value("acme/relu", version=-1),
    "get a version as text": value("acme/relu", version="1"),
    "get a missing repository": value("acme/nothing", version=1),
    "get of a missing organization": value("nobody/nothing", version=1),
    "get a name with a space": value("acme/re lu", version=1),
    "get a name without organization": value("relu", version=1),
    "get something untrusted": value("evil/relu", version=1),
    "get something untrusted with trust": value("evil/relu", version=1, trust_remote_code=True),
    "get something on the list": value("evil/relu", version=1, trust_remote_code=["evil/relu"]),
    "get something not on the list": value("evil/relu", version=1, trust_remote_code=["evil/other"]),
    "get what needs something untrusted": value("acme/needs-evil", version=1),
    "get what needs something untrusted with trust": value("acme/needs-evil", version=1, trust_remote_code=True),
    "get what needs something on the list": value("acme/needs-evil", version=1, trust_remote_code=["evil/relu"]),
    "get for cpu": value("acme/relu", version=1, backend="cpu"),
    "get for another backend": value("acme/relu", version=1, backend="cuda"),
    "get for no backend": value("acme/relu", version=1, backend="bogus"),
    "get without a build": value("acme/gpu-only", version=1),
    "get when another version has a build": value("acme/newer", version=1),
    "get with an agent": value("acme/relu", version=1, user_agent="test/1"),
    "get with agents": value("acme/relu", version=1, user_agent={"framework": "test"}),
    "get without looking at the arch": value("acme/relu", version=1, check_arch=False),
    "get a nested package": value("acme/nested", version=1),
    "get without metadata": value("acme/bare", version=1),
    "get of type model": value("acme/model", version=1),
    "get what uses kernels": value("acme/user", version=1),
    "get what uses more than it declares": value("acme/sly", version=1),
    "get what depends on what has no build": value("acme/needs-gpu", version=1),
    "get what raises": value("acme/raises", version=1),
    "get what is misspelt": value("acme/misspelt", version=1),
    "get what imports a missing package": value("acme/imports", version=1),
    "get what needs a missing package": value("acme/wants-einops", version=1),
    "get what needs an unknown package": value("acme/wants-unknown", version=1),
    "get what needs newer kernels": value("acme/wants-newer", version=1),
    "get what was changed": value("acme/changed", version=1),
    "get a circle": value("acme/round-a", version=1),
    "has a build": has("acme/relu", version=1),
    "has a build at main": has("acme/relu", revision="main"),
    "has no build": has("acme/gpu-only", version=1),
    "has no build of what it needs": has("acme/needs-gpu", version=1),
    "has a missing version": has("acme/relu", version=9),
    "has a missing repository": has("acme/nothing", version=1),
    "has something untrusted": has("evil/relu", version=1),
    "has something untrusted with trust": has("evil/relu", version=1, trust_remote_code=True),
    "has neither": has("acme/relu"),
    "has for no backend": has("acme/relu", version=1, backend="bogus"),
    "has without looking at the arch": has("acme/relu", version=1, check_arch=False),
    "install": installed("acme/relu", version=2),
    "install a nested package": installed("acme/nested", version=1),
    "install without a build": installed("acme/gpu-only", version=1),
    "install something untrusted": installed("evil/relu", version=1),
    "install a missing version": installed("acme/relu", version=9),
    "install what is there": installed("acme/relu", version=1, local_files_only=True),
    "install what is not there": installed("acme/base", revision="b" * 40, local_files_only=True),
    "install neither": installed("acme/relu"),
    "variants": variants(MANY, version=1),
    "variants for cpu": variants(MANY, version=1, backend="cpu"),
    "variants of a missing version": variants(MANY, version=9),
    "variants for no backend": variants(MANY, version=1, backend="bogus"),
    "variants of neither": variants(MANY),
    "variants of something untrusted": variants("evil/relu", version=1),
    "local repository": local("acme/relu"),
    "local builds": local("acme/relu", "build"),
    "local build": local("acme/relu", "build/torch-cpu"),
    "local nested package": local("acme/nested"),
    "local for cpu": local("acme/relu", backend="cpu"),
    "local for no backend": local("acme/relu", backend="bogus"),
    "local with a dependency": local("acme/user"),
    "local without a build": local("acme/gpu-only"),
    "local build for another backend": local("acme/gpu-only", "build/torch-cuda"),
    "local folder that is missing": local("acme/nothing"),
    "local folder that is empty": lambda api, facts: api.get_local_kernel(Path(facts["empty"])).VALUE,
    "locked": locked("acme/relu", "lock"),
    "locked with a dependency": locked("acme/user", "whole_lock"),
    "locked without a dependency": locked("acme/user", "lock"),
    "locked by nobody": locked("acme/newer", "lock"),
    "locked and untrusted": locked("evil/relu", "lock"),
    "locked and trusted": locked("evil/relu", "lock", trust_remote_code=["evil/relu"]),
    "locked in an old file": locked("acme/relu", "legacy_lock"),
    "locked in a bad file": locked("acme/relu", "bad_lock"),
    "locked in a missing file": lambda api, facts: api.get_locked_kernel("acme/relu", lockfile=Path("none.lock")),
    "locked by the caller's package": lambda api, facts: api.get_locked_kernel("acme/relu", lockfile=None),
    "load what was downloaded": from_lock("acme/relu", "lock"),
    "load for cpu": from_lock("acme/relu", "lock", backend="cpu"),
    "load what was not downloaded": from_lock("acme/many", "lock"),
    "load what is not locked": from_lock("acme/newer", "lock"),
    "load by the caller's package": lambda api, facts: api.load_kernel("acme/relu", lockfile=None),
    "what is loaded": loaded,
    "a dependency outside of a kernel": lambda api, facts: api.get_kernel_dep("acme/base"),
}
