from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kernelhub.layers import joint


def pair(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes or ((3, 2), (4, 2))]


def test_joint_parameters_are_their_concatenation_without_a_copy() -> None:
    parts = pair()
    expected = torch.cat([part.detach() for part in parts])
    assert joint.join(parts, set())
    whole = joint.joined(parts, 0)
    assert torch.equal(whole, expected)
    assert whole.data_ptr() == parts[0].data_ptr()
    with torch.no_grad():
        parts[1].mul_(2)
        assert torch.equal(joint.joined(parts, 0), torch.cat(parts))
    joint.part(parts)
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in parts)
    assert torch.equal(joint.joined(parts, 0), torch.cat(parts))
    assert joint.joined(parts, 0).data_ptr() != parts[0].data_ptr()


def test_gradients_reach_the_parts_to_the_second_order() -> None:
    parts = pair()
    joint.join(parts, set())
    assert torch.autograd.gradcheck(lambda *each: joint.joined(each, 0) ** 3, tuple(parts))
    assert torch.autograd.gradgradcheck(lambda *each: joint.joined(each, 0) ** 3, tuple(parts))


def test_a_frozen_part_gets_no_gradient() -> None:
    parts = pair()
    parts[0].requires_grad_(False)
    joint.join(parts, set())
    total: Any = joint.joined(parts, 0).sum()
    total.backward()
    assert parts[0].grad is None
    assert parts[1].grad is not None
    parts[1].requires_grad_(False)
    assert not joint.joined(parts, 0).requires_grad


def test_parameters_that_somebody_else_knows_are_not_moved() -> None:
    flat = torch.randn(14)
    views = [nn.Parameter(flat[:6].view(3, 2)), nn.Parameter(flat[6:].view(4, 2))]
    assert not joint.join(views, set())
    assert joint.joined(views, 0).data_ptr() == flat.data_ptr()  # they are joint already
    tied = pair()
    assert not joint.join(tied, {tied[1].data_ptr()})
    assert not joint.join([*pair((3, 2)), *pair((3, 2), dtype=torch.float32)], set())
    assert not joint.join([nn.Parameter(torch.randn(2, 3).t()), *pair((3, 2))], set())
    shared: list[Any] = list(pair())
    shared[0].data.share_memory_()
    assert not joint.join(shared, set())
    assert not joint.join([torch.randn(3, 2), *pair((3, 2))], set())


def test_addresses_in_use_are_those_of_two_parameters() -> None:
    one, two = pair()
    again = nn.Parameter(one.data)
    assert joint.addresses_in_use([one, two]) == set()
    assert joint.addresses_in_use([one, two, again]) == {one.data_ptr()}


@pytest.mark.parametrize("dim", [0, 1])
def test_other_tensors_are_copied(dim: int) -> None:
    parts = [torch.randn(3, 2, requires_grad=True) for _ in range(2)]
    assert torch.equal(joint.joined(parts, dim), torch.cat(parts, dim))
    batched = torch.func.vmap(lambda a, b: joint.joined((a, b), 0))(torch.ones(5, 2), torch.ones(5, 3))
    assert batched.shape == (5, 5)
