"""``kernelhub serve``: a folder of repositories as a Hub endpoint."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Annotated

import typer


def serve(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Folder laid out as ORG/REPO/BRANCH/...")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8090,
) -> None:
    """Serve a folder of kernel repositories to huggingface_hub; needs the extra kernelhub[serve]."""
    # Imported by name: the HTTP server is an extra, and listing the commands must not need it.
    local_hub = importlib.import_module("kernelhub.serve").LocalHub
    with local_hub(folder, host=host, port=port) as hub:
        typer.echo(f"serving {folder} at {hub.url}\nuse it with: export HF_ENDPOINT={hub.url}\nstop with Ctrl+C")
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            typer.echo("stopped")
