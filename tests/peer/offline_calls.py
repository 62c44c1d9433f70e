"""Calls without the Hub, after others have filled the cache."""

from __future__ import annotations

from peer.loading_calls import Call, from_lock, has, installed, local, locked, value

CALLS: dict[str, Call] = {
    "get a version": value("acme/relu", version=1),
    "get a commit": lambda api, facts: api.get_kernel("acme/relu", revision=facts["commits"]["acme/relu"]).VALUE,
    "get what uses kernels": value("acme/user", version=1),
    "get a version that was never asked for": value("acme/many", version=1),
    "get a commit that was never asked for": value("acme/many", revision="a" * 40),
    "get something untrusted with trust": value("evil/relu", version=1, trust_remote_code=True),
    "get something untrusted": value("evil/relu", version=1),
    "has a build": has("acme/relu", version=1),
    "has a commit that was never asked for": has("acme/many", revision="a" * 40),
    "install what is there": installed("acme/relu", version=2),
    "local repository": local("acme/relu"),
    "locked": locked("acme/relu", "lock"),
    "load what was downloaded": from_lock("acme/relu", "lock"),
    "load something untrusted": from_lock("evil/relu", "lock"),
}
