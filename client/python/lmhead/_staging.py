"""Tensors to memory that the client library reads, and results back.

CPU tensors are lent as they are, when dense. CUDA tensors go through pinned buffers on copy streams of their own: the
download is waited for once, by its event, on the thread that submits; the upload of the gradient is ordered before what
the caller's stream does next, without waiting.
"""

from __future__ import annotations

import threading
from typing import Any, Dict, Optional, Sequence, Tuple

import torch

DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
DTYPE_NAMES = {torch.float32: "DTYPE_FLOAT32", torch.bfloat16: "DTYPE_BFLOAT16", torch.float16: "DTYPE_FLOAT16"}
DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_copy_streams: Dict[Tuple[torch.device, str], "torch.cuda.Stream"] = {}
_copy_streams_lock = threading.Lock()


def check_tensor(tensor: Any, name: str) -> None:
    """TypeError when it is none; ValueError when it has no dense data."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, want a torch.Tensor")
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise ValueError(f"{name} is {tensor.layout} on {tensor.device}, want a dense tensor with data")


def check_dtype(tensor: torch.Tensor, name: str) -> None:
    """ValueError when the wire does not have the tensor's dtype."""
    check_tensor(tensor, name)
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name} is {tensor.dtype}, want torch.float32, torch.bfloat16 or torch.float16")


def _copy_stream(device: torch.device, direction: str) -> "torch.cuda.Stream":
    with _copy_streams_lock:
        if (device, direction) not in _copy_streams:
            _copy_streams[device, direction] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return _copy_streams[device, direction]


class Download:
    """Host copies of a call's inputs, all under way together. Tensors of the CPU are there at once."""

    def __init__(self, inputs: Dict[str, torch.Tensor]):
        self._event: Optional["torch.cuda.Event"] = None
        devices = {tensor.device for tensor in inputs.values() if tensor.is_cuda}
        if len(devices) > 1:
            raise ValueError(f"the call's tensors are on {sorted(map(str, devices))}, want one device")
        dense = {name: tensor.detach().contiguous() for name, tensor in inputs.items()}
        self.host = {name: tensor for name, tensor in dense.items() if not tensor.is_cuda}
        for device in devices:
            self._start(device, {name: tensor for name, tensor in dense.items() if tensor.is_cuda})

    def _start(self, device: torch.device, tensors: Dict[str, torch.Tensor]) -> None:
        stream = _copy_stream(device, "down")
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for name, tensor in tensors.items():
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                pinned.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
                self.host[name] = pinned
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(stream)

    def wait(self) -> Dict[str, torch.Tensor]:
        """The host tensors, once they hold the data: the call's only wait for the device."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self.host


def empty_like_host(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A host tensor for results that go to ``device``."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``host`` on ``device``, ready for the current stream, which does not wait on the host."""
    if device.type != "cuda":
        return host.to(device)
    stream = _copy_stream(device, "up")
    current = torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        there = host.to(device, non_blocking=True)
    current.wait_stream(stream)
    there.record_stream(current)
    return there
