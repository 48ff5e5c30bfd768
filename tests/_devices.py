"""A pretended accelerator: tensors that are computed on the CPU and say that they are elsewhere.

    with pretending():
        output = moved(model)(ids.to(DEVICE))

As on a real one, an operation that meets a tensor of the CPU with dimensions is an error, tensors
must be brought back before NumPy reads them, and copies, indices and numbers of no dimension may
cross. `torch.autocast`, which our code only switches off, knows no such device and is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("lazy:0")  # a type that every torch knows and none computes on
aten = torch.ops.aten
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
CROSSING = {aten.copy_.default, aten._to_copy.default, aten._index_put_impl_.default, *INDEXED}


class Elsewhere(Tensor):
    """A tensor of DEVICE, with its values in `inner`."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        found = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        found.inner = inner
        return found

    def __repr__(self, **_: Any) -> str:
        return f"Elsewhere({self.inner!r})"

    def tolist(self) -> Any:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextlib.contextmanager
def pretending() -> Iterator[None]:
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) in two steps
    try:
        with (
            mock.patch("torch.autocast", return_value=contextlib.nullcontext()),
            mock.patch.object(torch, DEVICE.type, torch.cpu, create=True),  # for checkpointing
            _Mode(),
        ):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


def moved(model: Any) -> Any:
    """The same model with its parameters and buffers on DEVICE; tied ones stay tied."""
    known: dict[int, Any] = {}
    for module in model.modules():
        for name, one in module._parameters.items():
            if one is not None:
                other = nn.Parameter(Elsewhere(one.detach()), requires_grad=one.requires_grad)
                module._parameters[name] = known.setdefault(id(one), other)
        for name, one in module._buffers.items():
            if one is not None:
                module._buffers[name] = known.setdefault(id(one), Elsewhere(one))
    return model


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    elsewhere = [one for one in tensors if isinstance(one, Elsewhere)]
    here = [one for one in tensors if not isinstance(one, Elsewhere) and one.dim()]
    if elsewhere and here and func not in CROSSING:
        shapes = [tuple(one.shape) for one in here]
        raise RuntimeError(f"{func} meets tensors of the CPU, of shapes {shapes}, on {DEVICE}")
    stays = bool(elsewhere) if func not in INDEXED else isinstance(args[0], Elsewhere)
    if (wanted := kwargs.get("device")) is not None:
        stays = torch.device(wanted).type == DEVICE.type
        kwargs = {**kwargs, "device": torch.device("cpu")}
    plain = tree_map_only(Elsewhere, lambda one: one.inner, (args, kwargs))
    found = func(*plain[0], **plain[1])
    if func is aten.copy_.default:
        return args[0]
    if not stays:
        return found
    found = tree_map_only(Tensor, Elsewhere, found)
    return return_and_correct_aliasing(func, args, kwargs, found) if elsewhere else found
