"""Endpoint: which addresses are safe to ask, and which token belongs to one."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from huggingface_hub import get_token

from kernelhub import setting
from kernelhub.errors import HubUnavailable


def token_for(endpoint: str, token: str | bool | None) -> str | None:
    """The token that may be sent to an endpoint: a stored one belongs to the endpoint of the environment (S-21)."""
    if isinstance(token, str):
        return token
    implicit = token is None and not setting.flag("HF_HUB_DISABLE_IMPLICIT_TOKEN")
    if token is True or (implicit and origin(endpoint) == origin(setting.endpoint())):
        return get_token()
    return None


def refuse_unsafe(endpoint: str) -> None:
    """Plain http is for this machine only: anyone between could swap code, and would see the token (S-20).

    A password in an address would end up in records and messages.
    """
    parts = urlsplit(endpoint)
    if parts.username is not None or parts.password is not None:
        plain = f"{parts.scheme}://{parts.hostname}"
        raise HubUnavailable(plain, "its address must not hold a user or password; pass token=... or set HF_TOKEN")
    if parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(parts.hostname or "")):
        return
    raise HubUnavailable(endpoint, "only https is accepted (http for this machine's own addresses only)")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def origin(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port: what a token belongs to."""
    parts = urlsplit(url)
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        port = None
    return parts.scheme, parts.hostname, port
