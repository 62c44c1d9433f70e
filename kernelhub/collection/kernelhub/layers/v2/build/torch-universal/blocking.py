"""How many rows to work on at a time."""

import torch

# Two megabytes of float32: large enough to hide the cost of an operator call, small enough for the
# few tensors of one block to stay in the last cache of a CPU.
_BLOCK_ELEMENTS = 1 << 19


def row_blocks(rows: int, width: int, device: torch.device) -> list[slice]:
    """Split `rows` rows of `width` elements into slices worth handling together.

    Accelerators get one slice: their launches cost more than their memory traffic saves.
    """
    size = rows if device.type != "cpu" else max(1, _BLOCK_ELEMENTS // max(width, 1))
    return [slice(start, start + size) for start in range(0, rows, max(size, 1))]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
