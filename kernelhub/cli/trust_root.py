"""``kernelhub trust-root``: whose word counts when signatures are checked, how old that is, and a newer one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelhub import setting
from kernelhub.cli import option
from kernelhub.errors import InvalidConfig, RefreshFailed
from kernelhub.rootupdate import PUBLIC_URL, write
from kernelhub.rootupdate import refresh as ask
from kernelhub.signer import missing_verifier
from kernelhub.trustroot import TrustRoot

if TYPE_CHECKING:
    from kernelhub.policy import Policy

app = typer.Typer(help="Show or refresh the trust root that signatures are checked with.", no_args_is_help=True)


@app.command("info")
def info(as_json: option.AsJson = False) -> None:
    """Show the trust root in use: which file, how old, and whom it trusts.

    Exit code 1 if no signature can be checked here: it is too old, or the extra is not installed.
    """
    policy = option.open_session(None, None, False).policy
    facts = facts_of(TrustRoot.in_use(policy), policy)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        for name, value in facts.items():
            typer.echo(f"{name:<12}{', '.join(value) if isinstance(value, list) else value}")
    if facts["problem"]:
        raise typer.Exit(1)


@app.command("refresh")
def refresh(
    to: Annotated[Path | None, typer.Option(help="Write it to this file, e.g. for a machine without network.")] = None,
    url: Annotated[str, typer.Option(help="The update repository.")] = PUBLIC_URL,
    first_key: Annotated[Path | None, typer.Option(help="The first root.json of another update repository.")] = None,
) -> None:
    """Fetch the trust root that is good now; the only command about signatures that uses the network."""
    if setting.offline():
        raise RefreshFailed(url, "kernelhub is offline (HF_HUB_OFFLINE)")
    root = ask(url, None if first_key is None else _read(first_key))
    path = setting.usable_path(to) if to else setting.config_folder() / setting.TRUST_ROOT_NAME
    write(root, path)
    typer.echo(f"{path}: trust root of {root.told_time}, {len(root.authorities)} authorities")


def facts_of(root: TrustRoot, policy: Policy) -> dict[str, Any]:
    """The trust root in plain data; ``problem`` is why nothing can be checked with it, or empty."""
    warn, fail = policy.root_days
    age = f"older than {fail} days: run `kernelhub trust-root refresh`" if root.days > fail else ""
    return {
        "origin": root.origin,
        "source": root.source,
        "time": root.told_time,
        "days": f"{root.days:.0f} (told from {warn} on, refused from {fail} on)",
        "authorities": root.authorities,
        "digest": root.digest,
        "problem": age or missing_verifier(),
    }


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfig(str(path), f"cannot be read ({error.strerror})", "a root.json", "--first-key") from error
