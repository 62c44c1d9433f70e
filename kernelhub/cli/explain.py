"""``kernelhub explain``: what would be loaded, why, and what to do when nothing fits."""

from __future__ import annotations

from kernelhub import api
from kernelhub.cli import option


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
    option.show(api.explain(request, backend=backend, trust_remote_code=trust or False, session=session), as_json)
