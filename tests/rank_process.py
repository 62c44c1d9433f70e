"""Rank process: how one process of a job over gloo begins and ends."""

from __future__ import annotations

import faulthandler
import os
import sys
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

if TYPE_CHECKING:
    from pathlib import Path


def join(rank: int, folder: Path, world: int) -> None:
    """Meet the other processes in a folder."""
    faulthandler.enable()
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)


def leave() -> NoReturn:
    """End this process, whose work is done and written, but not its interpreter.

    A model that was sharded keeps gloo's threads alive, destroyed group or not, and they may still hold tensors: to let
    go of one while the interpreter ends makes torch abort the process (REF pytorch/pytorch#179291).
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
