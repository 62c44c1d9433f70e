"""Write a Hub-format kernel repository whose layers call the functions of the installed package liger-kernel.

The layers are those of the shipped collection, with its checks of what a layer computes; only the functions below them
are Liger's. So a model is bound by mapping strings in both cases, and what differs is the kernels alone::

    root = write(folder)                            # then serve it: kernelhub serve FOLDER
    kernelize(model, {"RMSNorm": "liger/layers@v1:RMSNorm"}, ...)

`python-depends` is a closed list of the Hub, and liger-kernel is not on it: the build says in `upstream` what it wraps,
and importing it without the package fails with the package's name.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
from pathlib import Path

import kernelhub

REPOSITORY = "liger/layers"
MAPPING = {
    layer: f"{REPOSITORY}@v1:{layer}" for layer in ("RMSNorm", "SwiGLUMLP", "rotary_pos_emb", "FusedLinearCrossEntropy")
}
_COLLECTION = (
    Path(kernelhub.__file__).parent / "collection" / "kernelhub" / "layers" / "v2" / "build" / "torch-universal"
)
_OWN = ("__init__.py", "layers.py", "metadata.json")

INIT = '''"""Layers whose kernels are the functions of liger-kernel."""

from . import layers

__all__ = ["layers"]
'''

LIGER = '''"""What the layers call, by functions of liger-kernel."""

import liger_kernel.transformers.functional as liger
from torch import Tensor, nn

from .labels import causal_labels


def rms_norm(x: Tensor, weight: Tensor, eps: float, cast_last: bool = False) -> Tensor:
    """Normalise the last dimension of `x` by its root mean square, then scale it."""
    return liger.liger_rms_norm(x, weight, eps, 0.0, "gemma" if cast_last else "llama", False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of `x` to mean 0 and variance 1, then scale and shift it."""
    return liger.liger_layer_norm(x, weight, bias, eps)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Compute `act(gate) * up`; GELU is that by tanh."""
    return liger.liger_swiglu(gate, up) if activation == "silu" else liger.liger_geglu(gate, up)


def gated_linear(gate: Tensor, up: Tensor, linear: nn.Linear, activation: str) -> Tensor:
    """Compute `linear(act(gate) * up)`."""
    return linear(gated(gate, up, activation))


def rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions."""
    return liger.liger_rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Compute the cross entropy of `hidden @ weight.T` and `labels` without the logits."""
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = liger.liger_fused_linear_cross_entropy(
        hidden, weight, labels, bias=bias, ignore_index=ignore_index, reduction=reduction
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_kwargs: object,
) -> Tensor:
    """Compute the loss of a causal language model from its logits."""
    targets = causal_labels(labels, ignore_index) if shift_labels is None else shift_labels
    reduction = "mean" if num_items_in_batch is None else "sum"
    rows = logits.reshape(-1, vocab_size)
    loss = liger.liger_cross_entropy(
        rows, targets.reshape(-1).to(rows.device), ignore_index=ignore_index, reduction=reduction
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch
'''

# Liger's GELU is the one by tanh, and nobody has tried its functions under torch.compile here.
CHANGES = (
    (r"from \.cross_entropy import", "from .liger import"),
    (r"from \.fused_linear_cross_entropy import", "from .liger import"),
    (
        r"from \.gated import Activation, gated, gated_linear",
        "from .gated import Activation\nfrom .liger import gated, gated_linear",
    ),
    (r"from \.layer_norm import", "from .liger import"),
    (r"from \.rms_norm import", "from .liger import"),
    (r"from \.rotary import", "from .liger import"),
    (r'\("gelu", "gelu_tanh"\)', '("gelu_tanh",)'),
    (r"can_torch_compile: ClassVar\[bool\] = True", "can_torch_compile: ClassVar[bool] = False"),
)


def write(root: Path, variant: str = "torch-cuda") -> Path:
    """Write the repository below `root`, with its publisher's page, and return the folder of the build.

    Args:
        root: the folder that `kernelhub serve` or `LocalHub` serves.
        variant: `torch-cuda`, or another name of a pure Python build, to try it on another machine.
    """
    files = {path.name: path.read_text(encoding="utf-8") for path in _COLLECTION.glob("*.py") if path.name not in _OWN}
    files |= {"__init__.py": INIT, "liger.py": LIGER, "layers.py": _layers()}
    build = root / REPOSITORY / "v1" / "build" / variant
    build.mkdir(parents=True)
    for name, text in files.items():
        (build / name).write_text(text, encoding="utf-8")
    (build / "metadata.json").write_text(json.dumps(_metadata(files, variant), indent=2), encoding="utf-8")
    owner = root / REPOSITORY.split("/", maxsplit=1)[0]
    (owner / "organization.json").write_text(json.dumps({"trustedKernelPublisher": True}), encoding="utf-8")
    return build


def _layers() -> str:
    """Return the layers of the collection with Liger's functions below them."""
    text = (_COLLECTION / "layers.py").read_text(encoding="utf-8")
    for pattern, replacement in CHANGES:
        text, count = re.subn(pattern, replacement, text)
        if not count:
            raise LookupError(f"the layers of the collection have no {pattern!r} any more")
    return text


def _metadata(files: dict[str, str], variant: str) -> dict[str, object]:
    digests = {
        name: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for name, text in sorted(files.items())
    }
    identity = hashlib.sha256(repr(digests).encode()).hexdigest()[:7]
    return {
        "name": "liger-layers",
        "id": f"_liger_layers_{identity}",
        "version": 1,
        "license": "BSD-2-Clause",
        "upstream": "https://github.com/linkedin/Liger-Kernel",
        "python-depends": [],
        "backend": {"type": "cuda" if variant == "torch-cuda" else "cpu"},
        "digest": {"algorithm": "sha256", "files": digests},
    }


def main() -> None:
    """Write it where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write the repository to, for `kernelhub serve`")
    print(write(parser.parse_args().folder))


if __name__ == "__main__":
    main()
