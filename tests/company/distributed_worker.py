"""What each of two processes does in ``test_distributed.py``: the same steps plain and with kernels, over gloo."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import rank_process
import torch
import torch.distributed as dist
from layers.tiny_model import IDS, tiny
from torch import nn

import kernelhub
from company.embedded import LABELS, kernelized

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WORLD = 2


def work(rank: int, folder: Path) -> None:
    """Run every case and write what came of it to ``<rank>.json``."""
    rank_process.join(rank, folder, WORLD)
    warnings.simplefilter("ignore")  # torch's own about FSDP on CPU
    found = {name: attempt(case) for name, case in CASES.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    rank_process.leave()


def attempt(case: Callable[[bool, bool], dict[str, Any]]) -> dict[str, Any]:
    """The same numbers plain, bound before wrapping and bound after it; the rest tells what the kernels did."""
    plain = case(False, False)
    found: dict[str, Any] = {}
    for order, late in (("kernelize, then wrap", False), ("wrap, then kernelize", True)):
        try:
            ours = case(True, late)
        except Exception as error:
            found[order] = {"error": f"{type(error).__name__}: {error}"}
            continue
        pairs = zip(ours["numbers"], plain["numbers"], strict=True)
        close = [torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in pairs]
        found[order] = {"same": all(close) and len(close) > 1, "fused": ours["fused"], "ran": ours["ran"]}
    return found


def batch() -> dict[str, torch.Tensor]:
    """This process's half."""
    rank = dist.get_rank()
    return {"input_ids": IDS[rank : rank + 1], "labels": LABELS[rank : rank + 1]}


def trained(
    model: Any,
    bind: bool,
    late: bool,
    wrap: Callable[[Any], Any],
    gradients: Callable[[Any], Any],
    inputs: dict[str, torch.Tensor] | None = None,
) -> Any:
    model = model.train()
    if bind and not late:
        kernelized(model)
    watch = Watch()
    wrapped = wrap(model)
    if bind and late:
        kernelized(wrapped)
    with watch.on():
        for _ in range(2):
            wrapped.zero_grad()
            out = wrapped(**(inputs or batch()))
            out.loss.backward()
    numbers = [out.loss.detach(), *gradients(wrapped)]
    return {"numbers": numbers, "fused": out.logits is None, "ran": watch.ran}


class Watch:
    """Counts the calls of the embedded kernels' own functions."""

    def __init__(self) -> None:
        self.ran: dict[str, int] = {}

    def on(self) -> Any:
        from contextlib import ExitStack
        from unittest.mock import patch

        stack = ExitStack()
        layers = kernelhub.load_kernel("builtin").layers
        for name in ("rms_norm", "gated", "gated_linear", "fused_linear_cross_entropy"):
            stack.enter_context(patch.object(layers, name, self._counting(name, getattr(layers, name))))
        return stack

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.ran[name] = self.ran.get(name, 0) + 1
            return function(*args, **kwargs)

        return counted


def local_gradients(model: nn.Module) -> list[torch.Tensor]:
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def full_gradients(model: nn.Module) -> list[torch.Tensor]:
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each.clone() for each in gradients]


def ddp(bind: bool, late: bool) -> Any:
    return trained(tiny(), bind, late, nn.parallel.DistributedDataParallel, local_gradients)


def fsdp2(bind: bool, late: bool) -> Any:
    from torch.distributed.fsdp import fully_shard

    def shard(model: Any) -> Any:
        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)

    return trained(tiny(), bind, late, shard, full_gradients)


def fsdp2_every_layer(bind: bool, late: bool) -> Any:
    """Each norm, projection and the head is a unit: a weight is whole only inside the call of its own module."""
    from torch.distributed.fsdp import fully_shard

    def shard(model: Any) -> Any:
        leaves = [module for module in model.modules() if list(module.parameters(recurse=False))]
        for module in leaves:
            fully_shard(module)
        return fully_shard(model)

    return trained(tiny(), bind, late, shard, full_gradients)


def fsdp1(bind: bool, late: bool) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    def shard(model: Any) -> Any:
        policy = ModuleWrapPolicy({type(model.model.layers[0])})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )

    return trained(tiny(), bind, late, shard, local_gradients)


def tensor_parallel(bind: bool, late: bool) -> Any:
    """Projections split by column and row; the norms before them take and hold DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, distribute_module
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def split(model: Any) -> Any:
        mesh = init_device_mesh("cpu", (WORLD,))
        plan = {
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        for layer in model.model.layers:
            parallelize_module(layer, mesh, plan)
            distribute_module(
                layer.post_attention_layernorm,
                mesh,
                input_fn=lambda module, inputs, mesh: tuple(DTensor.from_local(each, mesh) for each in inputs),
                output_fn=lambda module, output, mesh: output.to_local(),
            )
        return model

    return trained(tiny(), bind, late, split, full_gradients, {"input_ids": IDS, "labels": LABELS})


CASES = {
    "DDP": ddp,
    "FSDP2, a unit per decoder layer": fsdp2,
    "FSDP2, a unit per module": fsdp2_every_layer,
    "FSDP1": fsdp1,
    "tensor parallel, DTensor": tensor_parallel,
}
