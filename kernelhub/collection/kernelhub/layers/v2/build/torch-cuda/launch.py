"""When and how large to launch."""

from functools import cache

import torch
import triton
from torch import Tensor

_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Beyond this a row no longer fits in the registers of one program.
_MAX_WIDTH = 32768
# Measured on an H200: small tiles, many elements a thread, several programs a processor.
_TILE_ELEMENTS = 2048


def runs_here(*tensors: Tensor) -> bool:
    """Tell whether the kernels can take these tensors; the plain formulas take all others.

    The kernels compute in float32, so float64 is not for them. A compiler gets the formulas too: it
    fuses them by itself.
    """
    if torch.compiler.is_compiling():
        return False
    device = tensors[0].device
    return device.type == "cuda" and all(t.device == device and t.dtype in _KERNEL_DTYPES for t in tensors)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def fits_one_program(width: int) -> bool:
    """Tell whether a program can hold a row of this width."""
    return 0 < width <= _MAX_WIDTH


@cache
def row_tile(width: int) -> tuple[int, int, int]:
    """Return the rows and columns of a program's tile for rows of `width`, and its warps."""
    columns = triton.next_power_of_2(width)
    rows = max(1, _TILE_ELEMENTS // columns)
    return rows, columns, max(2, min(32, rows * columns // 1024))


def as_rows(x: Tensor) -> Tensor:
    """View `x` as `(rows, last dimension)` with adjacent columns; copies only if it has to."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def programs(device: torch.device, tiles: int) -> int:
    """Return how many programs to start when each handles tiles in turn."""
    return max(1, min(tiles, 8 * _processors(device)))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
