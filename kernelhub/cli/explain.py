"""``kernelhub explain``: what would be loaded, why, and what to do when nothing fits."""

from __future__ import annotations

from kernelhub.cli import option
from kernelhub.explanation import explain as explain_request
from kernelhub.request import KernelRequest


def explain(
    request: option.Request,
    target: option.Target = None,
    backend: option.Backend = None,
    cache_dir: option.CacheDir = None,
    offline: option.Offline = False,
    trust: option.Trust = None,
    as_json: option.AsJson = False,
) -> None:
    """Say which build would serve REQUEST and why, without downloading or importing it."""
    session = option.open_session(target, cache_dir, offline)
    option.show(explain_request(KernelRequest.parse(request), session, backend=backend, trust=trust or False), as_json)
