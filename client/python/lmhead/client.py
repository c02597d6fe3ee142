"""Control calls: one connection to one server."""

from __future__ import annotations

from typing import Any, Dict, Optional

from lmhead import _native


def plain_address(address: str) -> str:
    """The address as gRPC takes it: ``grpc://`` is optional."""
    return address[len("grpc://"):] if address.startswith("grpc://") else address


class Client:
    """A connection to one server. Thread-safe. Processes forked later (a DataLoader's workers) must not use it.

    Args:
        address: ``host:port``, ``grpc://host:port``, ``dns:///name:port`` or ``unix:/path``.
        connect_timeout: seconds for the first connection, and for each one after a break.
        call_timeout: seconds for a control call; PrepareStep adds its own wait.
        max_attempts: of a call or a stream, after UNAVAILABLE, with exponential back-off.
        tls_ca_file: PEM; encrypts, and the service must have a certificate of these.
        tls_cert_file, tls_key_file: PEM; for a service that demands a certificate.
        tls_server_name: name that the service's certificate must have; None: the address's host.
        token_file: sent as ``authorization: Bearer``; needs TLS.
        request_id: goes with every call into the server's log and its errors; None: a random one.

    Raises:
        Unavailable: nobody answers in time.
    """

    def __init__(self, address: str, *, connect_timeout: float = 10.0, call_timeout: float = 60.0,
                 max_attempts: int = 5, tls_ca_file: Optional[str] = None, tls_cert_file: Optional[str] = None,
                 tls_key_file: Optional[str] = None, tls_server_name: Optional[str] = None,
                 token_file: Optional[str] = None, request_id: Optional[str] = None):
        self.address = address
        self.native = _native.NativeClient(plain_address(address), connect_timeout, call_timeout, max_attempts, {
            "tls_ca_file": tls_ca_file, "tls_cert_file": tls_cert_file, "tls_key_file": tls_key_file,
            "tls_server_name": tls_server_name, "token_file": token_file, "request_id": request_id})

    def call(self, method: str, timeout: float = 0.0, **request: Any) -> Dict[str, Any]:
        """Any unary call of lmhead.v1.LmHeadService, such as ``call("GetHead", head="lm")``.

        The request's fields are keywords, the answer is a dictionary: both as protobuf's JSON, with the names of the
        .proto files, where 64-bit integers are strings and enumerators go by their names.

        Args:
            method: name of the call.
            timeout: seconds; 0 means the client's ``call_timeout``.

        Raises:
            Error: of the class for the server's code.
        """
        return self.native.call(method, request, timeout)

    def server_info(self) -> Dict[str, Any]:
        """GetServerInfo: version, incarnation, backend, limits, heads, memory."""
        return self.call("GetServerInfo")

    def incarnation(self) -> int:
        """The random id of the server process that answers now."""
        return int(self.server_info()["incarnation"])

    def close(self) -> None:
        """Closes the connection; writers opened with it go on."""
        self.native.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: Optional[object]) -> None:
        self.close()
