"""``kernelhub cache``: look into the store, check it, and free space, without touching what is in use."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kernelhub.cli import option
from kernelhub.errors import InvalidRequest, NotCached
from kernelhub.inventory import StoredKernel, damage, matching, outdated, stored_kernels
from kernelhub.request import KernelRequest

if TYPE_CHECKING:
    from kernelhub.store import Store

app = typer.Typer(help="List, check and prune the kernels stored on this machine.", no_args_is_help=True)

Requests = Annotated[
    list[str] | None, typer.Argument(help="org/repo or org/repo@revision; default: all that is stored.")
]
Named = Annotated[list[str], typer.Argument(help="org/repo, or org/repo@revision for one commit or version.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Remove nothing; show what would be removed.")]


@app.command("ls")
def list_kernels(requests: Requests = None, cache_dir: option.CacheDir = None, as_json: option.AsJson = False) -> None:
    """List stored builds: size, last use (to the day), whether a process uses them now, state, origin."""
    kernels = _chosen(_open(cache_dir), requests)
    if as_json:
        _print_json([kernel.to_dict() for kernel in kernels])
        return
    table = Table("repository", "commit", "variant", "size", "last use", "state", "endpoint", box=None)
    for kernel in kernels:
        facts = kernel.to_dict()
        used = "in use" if kernel.in_use else facts["last_use"]
        table.add_row(
            facts["repo_id"],
            facts["commit"][:12],
            facts["variant"],
            _size(facts["size"]),
            used,
            kernel.state,
            facts["endpoint"],
        )
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)
    console.print(table)
    console.print(f"{len(kernels)} builds, {_size(sum(kernel.build.manifest.size for kernel in kernels))}")


@app.command("info")
def info(request: option.Request, cache_dir: option.CacheDir = None, as_json: option.AsJson = False) -> None:
    """Show what is known about the stored builds of REQUEST, their files and hashes included."""
    shown = [
        {**kernel.to_dict(), "files": [file._asdict() for file in kernel.build.manifest.files]}
        for kernel in _chosen(_open(cache_dir), [request])
    ]
    if as_json:
        _print_json(shown)
        return
    for facts in shown:
        for name, value in facts.items():
            if name != "files":
                typer.echo(f"{name:<10}{_printable(value)}")
        for file in facts["files"]:
            typer.echo(f"          {file['sha256']}  {file['size']:>12}  {file['path']}")


@app.command("verify")
def verify(requests: Requests = None, cache_dir: option.CacheDir = None, as_json: option.AsJson = False) -> None:
    """Hash every stored file again and compare it with what was stored; exit code 1 if anything differs."""
    kernels = _chosen(_open(cache_dir), requests)
    found = [(kernel, damage(kernel)) for kernel in kernels]
    if as_json:
        _print_json([{**kernel.to_dict(), "damage": problem} for kernel, problem in found])
    else:
        for kernel, problem in found:
            typer.echo(f"{'damaged' if problem else 'good':<9}{problem or kernel.name}")
    bad = sum(problem is not None for _, problem in found)
    typer.echo(f"{len(found)} builds, {bad} damaged{'; loading them fetches them again' if bad else ''}", err=True)
    raise typer.Exit(1 if bad else 0)


@app.command("prune")
def prune(
    older_than: Annotated[float | None, typer.Option(min=0, help="Remove builds not used for so many days.")] = None,
    keep_newest: Annotated[
        bool, typer.Option("--keep-newest", help="Keep the most recently used build of each repository.")
    ] = False,
    break_lock: Annotated[
        bool,
        typer.Option("--break-lock", help="Take away locks of other machines' processes, which must have ended."),
    ] = False,
    dry_run: DryRun = False,
    cache_dir: option.CacheDir = None,
    as_json: option.AsJson = False,
) -> None:
    """Remove builds that were not used for a while, and what interrupted downloads have left; never one in use."""
    if older_than is None and not keep_newest and not break_lock:
        raise InvalidRequest("", "nothing says what to remove", "--older-than DAYS, --keep-newest or --break-lock")
    store = _open(cache_dir)
    if break_lock:
        _break_locks(store, dry_run)
    if older_than is not None or keep_newest:
        _remove(store, outdated(list(stored_kernels(store)), older_than, keep_newest=keep_newest), dry_run, as_json)
    if not dry_run:
        store.sweep()


@app.command("rm")
def remove(
    requests: Named, dry_run: DryRun = False, cache_dir: option.CacheDir = None, as_json: option.AsJson = False
) -> None:
    """Remove the stored builds of REQUESTS; exit code 1 if a process uses one of them."""
    store = _open(cache_dir)
    if not _remove(store, _chosen(store, requests), dry_run, as_json):
        raise typer.Exit(1)


@app.command("path")
def path(
    request: Annotated[str | None, typer.Argument(help="Show the folders of its builds.")] = None,
    cache_dir: option.CacheDir = None,
) -> None:
    """Show the folder of the store, or those of the stored builds of REQUEST."""
    store = _open(cache_dir)
    folders = [store.root] if request is None else [kernel.build.files_folder for kernel in _chosen(store, [request])]
    for folder in folders:
        typer.echo(bytes(folder) + b"\n", nl=False)  # whatever bytes it is made of


def _open(cache_dir: option.CacheDir) -> Store:
    return option.open_session(None, cache_dir, offline=True).store


def _chosen(store: Store, requests: list[str] | None) -> list[StoredKernel]:
    """The stored builds that requests name, each once.

    Raises:
        NotCached: a request names none.
    """
    kernels = list(stored_kernels(store))
    if not requests:
        return kernels
    chosen: dict[str, StoredKernel] = {}
    for text in requests:
        request = KernelRequest.parse(text)
        if request.repo_id is None:
            raise InvalidRequest(text, "is not in the store", "org/repo or org/repo@revision")
        found = matching(kernels, request, store)
        if not found:
            raise NotCached(f"kernel {text}", store.root, f"kernelhub prefetch '{text}'")
        chosen |= {str(kernel.build.folder): kernel for kernel in found}
    return list(chosen.values())


def _remove(store: Store, kernels: list[StoredKernel], dry_run: bool, as_json: bool) -> bool:
    """Remove builds and tell about each; False when one is in use."""
    done = [(kernel, not kernel.in_use if dry_run else store.remove(kernel.build)) for kernel in kernels]
    if as_json:
        _print_json([{**kernel.to_dict(), "removed": gone and not dry_run} for kernel, gone in done])
    else:
        verb = "would remove" if dry_run else "removed"
        for kernel, gone in done:
            what = f"{kernel.name} ({_size(kernel.build.manifest.size)})"
            typer.echo(f"{verb} {what}" if gone else f"kept {what}: in use")
        size = _size(sum(kernel.build.manifest.size for kernel, gone in done if gone))
        typer.echo(f"{sum(gone for _, gone in done)} builds, {size} {'to free' if dry_run else 'freed'}", err=True)
    return all(gone for _, gone in done)


def _break_locks(store: Store, dry_run: bool) -> None:
    verb = "would remove" if dry_run else "removed"
    for path, holder, abandoned in store.break_locks(dry_run=dry_run):
        typer.echo(f"{verb if abandoned else 'kept'} {path.name}, held by {holder or 'an unknown process'}", err=True)


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def _printable(value: object) -> str:
    return str(value).encode("utf-8", "backslashreplace").decode()


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
