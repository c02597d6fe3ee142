"""liblmhead.so through ctypes: client/c/lmhead.h in Python, nothing more.

The library is found in the package (lib/liblmhead.so), or where the variable LMHEAD_LIBRARY says. ctypes releases the
interpreter's lock around every call, so that other threads go on while one waits. What may wait for long runs beside the
main thread, which alone takes Ctrl-C.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import math
import os
import pathlib
import queue
import threading
import weakref
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any, Callable, Dict, List, NoReturn, Optional, Tuple, TypeVar

from lmhead.errors import error_of

API_MAJOR = 1
API_MINOR = 0


class ClientOptions(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("connect_timeout_seconds", c_double), ("call_timeout_seconds", c_double),
                ("max_attempts", c_int32), ("reserved", c_int32), ("tls_ca_file", c_char_p),
                ("tls_cert_file", c_char_p), ("tls_key_file", c_char_p), ("tls_server_name", c_char_p),
                ("token_file", c_char_p), ("request_id", c_char_p)]


class WriterOptions(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("num_connections", c_int32), ("max_inflight_chunks", c_int32),
                ("chunk_bytes", c_int64), ("chunk_tokens", c_int64), ("send_checksums", c_int32), ("reserved", c_int32)]


class LossRows(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("num_tokens", c_int64), ("hidden_size", c_int64), ("hidden_dtype", c_int32),
                ("grad_scale", c_float), ("hidden_states", c_void_p), ("targets", c_void_p),
                ("token_weights", c_void_p), ("token_temperature", c_void_p), ("grad_hidden_states", c_void_p),
                ("token_loss", c_void_p), ("logprob", c_void_p), ("lse", c_void_p), ("entropy", c_void_p),
                ("argmax", c_void_p), ("logprob_grad", c_void_p), ("entropy_grad", c_void_p), ("old_logprob", c_void_p),
                ("advantage", c_void_p), ("reference_logprob", c_void_p), ("teacher_hidden_states", c_void_p),
                ("teacher_hidden_size", c_int64), ("teacher_hidden_dtype", c_int32), ("teacher_top_k", c_int32),
                ("teacher_topk_ids", c_void_p), ("teacher_topk_logprobs", c_void_p), ("topk_ids", c_void_p),
                ("topk_logprobs", c_void_p)]


class LossResult(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("loss_sum", c_double), ("num_tokens", c_int64),
                ("num_valid_tokens", c_int64), ("num_nonfinite_rows", c_int64), ("num_correct", c_int64),
                ("weight_sum", c_double), ("cross_entropy_sum", c_double), ("z_loss_sum", c_double),
                ("divergence_sum", c_double), ("entropy_sum", c_double), ("policy_sum", c_double),
                ("dropped_teacher_mass_sum", c_double), ("num_clipped", c_int64), ("old_policy_kl_sum", c_double),
                ("num_chunks", c_int64), ("num_duplicates", c_int64), ("queue_seconds", c_double),
                ("upload_seconds", c_double), ("compute_seconds", c_double), ("download_seconds", c_double)]


# Name: (types of the arguments before the error, result).
_HANDLE = c_void_p
_FUNCTIONS: Dict[str, List[Any]] = {
    "client_connect": [c_char_p, POINTER(ClientOptions), POINTER(_HANDLE)],
    "client_call": [_HANDLE, c_char_p, c_char_p, c_double, POINTER(c_void_p)],
    "client_load_weights": [_HANDLE, c_char_p, c_int32, c_int32, c_int64, c_int64, c_int64, c_void_p],
    "client_read_weights": [_HANDLE, c_char_p, c_int32, c_int32, c_int64, c_int64, c_int64, c_void_p],
    "client_accumulate_weight_gradient": [_HANDLE, c_char_p, c_uint64, c_uint64, c_char_p, c_uint64, c_int64, c_void_p,
                                          c_int64, c_int64, c_void_p, POINTER(c_uint64)],
    "writer_open": [_HANDLE, c_char_p, POINTER(WriterOptions), POINTER(_HANDLE)],
    "writer_submit": [_HANDLE, POINTER(LossRows), POINTER(c_uint64)],
    "writer_wait": [_HANDLE, c_uint64, POINTER(LossResult)],
    "writer_finish": [_HANDLE, POINTER(c_uint64)],
}
_CLOSERS = ("client_close", "writer_cancel", "writer_close", "error_free", "string_free")


def _find() -> str:
    stated = os.environ.get("LMHEAD_LIBRARY")
    if stated:
        return stated
    carried = pathlib.Path(__file__).parent / "lib" / "liblmhead.so"
    if carried.exists():
        return str(carried)
    raise ImportError(f"lmhead: {carried} is missing: install the wheel that `pip wheel client/python` builds, or set "
                      "LMHEAD_LIBRARY to a liblmhead.so")


def _load() -> ctypes.CDLL:
    path = _find()
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(f"lmhead: cannot load {path}: {error}") from error
    major, minor = c_int32(), c_int32()
    library.lmhead_api_version(byref(major), byref(minor))
    if major.value != API_MAJOR or minor.value < API_MINOR:
        raise ImportError(f"lmhead: {path} has interface version {major.value}.{minor.value}, this package wants "
                          f"{API_MAJOR}.{API_MINOR}: install both from one release")
    for name, arguments in _FUNCTIONS.items():
        function = getattr(library, f"lmhead_{name}")
        function.argtypes = [*arguments, POINTER(c_void_p)]
        function.restype = c_int32
    for name in _CLOSERS:
        function = getattr(library, f"lmhead_{name}")
        function.argtypes = [c_void_p]
        function.restype = None
    library.lmhead_error_message.argtypes = [c_void_p]
    library.lmhead_error_message.restype = c_char_p
    library.lmhead_version.restype = c_char_p
    return library


_library = _load()


def version() -> str:
    """Release of liblmhead.so."""
    return str(_library.lmhead_version().decode())


def _call(name: str, *arguments: Any) -> None:
    error = c_void_p()
    code = getattr(_library, f"lmhead_{name}")(*arguments, byref(error))
    if code == 0:
        return
    message = _library.lmhead_error_message(error).decode(errors="replace")
    _library.lmhead_error_free(error)
    raise error_of(code, message)


T = TypeVar("T")
LEAVE_SECONDS = 10.0  # How long a handle that is closed waits for interrupted calls; beyond that it is left as it is.
_connecting_process: Optional[int] = None  # Where the first connection was made.


def _spelt(value: Any) -> Any:
    """NaN and infinities as protobuf's JSON spells them, so that it is the server that refuses them, by field."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _spelt(one) for name, one in value.items()}
    return [_spelt(one) for one in value] if isinstance(value, (list, tuple)) else value


def _json(message: Dict[str, Any]) -> bytes:
    return json.dumps(_spelt(message)).encode()


class _Owner:
    """Holds one handle; closed once, at the latest when it is collected."""

    _closer: str
    _what: str

    def __init__(self, handle: c_void_p):
        self.handle: Optional[c_void_p] = handle
        self._process = os.getpid()
        self._calls = 0  # Beside the main thread.
        self._left = threading.Condition()
        _owners.add(self)

    def wait_for(self, work: Callable[[], T]) -> T:
        """``work()``, of calls with this handle; in the main thread so that KeyboardInterrupt ends the wait, not the call."""
        if threading.current_thread() is not threading.main_thread():
            return work()
        answer: "queue.SimpleQueue[Tuple[Optional[T], Optional[BaseException]]]" = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put((work(), None))
            except BaseException as error:
                answer.put((None, error))
            finally:
                with self._left:
                    self._calls -= 1
                    self._left.notify_all()

        with self._left:
            self._calls += 1
        threading.Thread(target=run, name="lmhead-call", daemon=True).start()
        found, error = answer.get()
        if error is not None:
            raise error
        return found  # type: ignore[return-value]

    def _unused(self) -> bool:
        """Whether the interrupted calls have left, in time."""
        with self._left:
            return self._left.wait_for(lambda: self._calls == 0, LEAVE_SECONDS)

    @property
    def opened(self) -> c_void_p:
        """The handle, for a call. RuntimeError when it is closed, or another process's."""
        if self._process != os.getpid():
            raise RuntimeError(f"lmhead: {self._what} belongs to process {self._process}, this is {os.getpid()}, forked from "
                               f"it without the threads behind {self._what}: use it in its own process, or spawn this one "
                               "(multiprocessing's \"spawn\") and connect here")
        if self.handle is None:
            raise RuntimeError(f"lmhead: {self._what} is closed: connect again")
        return self.handle

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise TypeError(f"lmhead: {self._what} can be neither pickled nor copied: send the address and the head's name, and "
                        "make lmhead.RemoteHead(address, name) of them there")

    def close(self) -> None:
        handle, self.handle = self.handle, None
        # A forked child, such as a DataLoader's worker, has the handle but not the threads behind it.
        if handle and self._process == os.getpid() and self._unused():
            getattr(_library, f"lmhead_{self._closer}")(handle)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.close()


_owners: "weakref.WeakSet[_Owner]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """What a program leaves open, while there is still an interpreter to close it."""
    for owner in list(_owners):
        owner.close()


class NativeClient(_Owner):
    """lmhead_client."""

    _closer = "client_close"
    _what = "the connection"

    def __init__(self, address: str, connect_timeout: float, call_timeout: float, max_attempts: int,
                 texts: Dict[str, Optional[str]]):
        global _connecting_process
        if _connecting_process not in (None, os.getpid()):
            raise RuntimeError(f"lmhead: process {_connecting_process} had a connection when it forked this one, {os.getpid()}, "
                               "which has none of the threads behind the library: spawn it (multiprocessing's \"spawn\"), or "
                               "fork before connecting")
        options = ClientOptions(ctypes.sizeof(ClientOptions), connect_timeout, call_timeout, max_attempts, 0)
        for name, text in texts.items():
            setattr(options, name, None if text is None else os.fsencode(text))
        handle = c_void_p()
        _connecting_process = os.getpid()
        _call("client_connect", address.encode(), byref(options), byref(handle))
        super().__init__(handle)

    def call(self, method: str, request: Dict[str, Any], timeout: float = 0.0) -> Dict[str, Any]:
        handle, message = self.opened, _json(request)

        def run() -> Dict[str, Any]:
            answer = c_void_p()
            _call("client_call", handle, method.encode(), message, timeout, byref(answer))
            try:
                text = ctypes.cast(answer, c_char_p).value or b"{}"
                found: Dict[str, Any] = json.loads(text.decode())
                return found
            finally:
                _library.lmhead_string_free(answer)

        return self.wait_for(run)

    def load_weights(self, head: str, tensor: int, dtype: int, row_start: int, rows: int, columns: int,
                     data: int) -> None:
        _call("client_load_weights", self.opened, head.encode(), tensor, dtype, row_start, rows, columns, data)

    def read_weights(self, head: str, tensor: int, dtype: int, row_start: int, rows: int, columns: int,
                     data: int) -> None:
        _call("client_read_weights", self.opened, head.encode(), tensor, dtype, row_start, rows, columns, data)

    def accumulate_weight_gradient(self, head: str, step: int, incarnation: int, worker: str, first_index: int,
                                   row_start: int, row_ids: Optional[int], rows: int, columns: int, data: int) -> int:
        pieces = c_uint64()
        _call("client_accumulate_weight_gradient", self.opened, head.encode(), step, incarnation, worker.encode(),
              first_index, row_start, row_ids, rows, columns, data, byref(pieces))
        return pieces.value


class NativeWriter(_Owner):
    """lmhead_writer."""

    _closer = "writer_close"
    _what = "the stream"

    def __init__(self, client: NativeClient, open_message: Dict[str, Any], connections: int, inflight_chunks: int,
                 chunk_bytes: int, chunk_tokens: int, checksums: bool):
        options = WriterOptions(ctypes.sizeof(WriterOptions), connections, inflight_chunks, chunk_bytes, chunk_tokens,
                                checksums, 0)
        handle = c_void_p()
        _call("writer_open", client.opened, _json(open_message), byref(options), byref(handle))
        super().__init__(handle)

    def submit(self, rows: LossRows) -> int:
        rows.struct_size = ctypes.sizeof(LossRows)
        ticket = c_uint64()
        _call("writer_submit", self.opened, byref(rows), byref(ticket))
        return ticket.value

    def wait(self, ticket: int) -> LossResult:
        handle = self.opened

        def run() -> LossResult:
            result = LossResult(ctypes.sizeof(LossResult))
            _call("writer_wait", handle, ticket, byref(result))
            return result

        return self.wait_for(run)

    def finish(self) -> int:
        handle = self.opened

        def run() -> int:
            chunks = c_uint64()
            _call("writer_finish", handle, byref(chunks))
            return chunks.value

        return self.wait_for(run)

    def cancel(self) -> None:
        if self.handle and self._process == os.getpid():
            _library.lmhead_writer_cancel(self.handle)
