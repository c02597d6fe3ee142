"""What the kubelet asks of a pod's health port: grpc.health.v1 without TLS, by curl, which is no more than a frame of HTTP/2."""

import subprocess

# HealthCheckResponse{status: SERVING} in a gRPC frame.
SERVING = bytes([0, 0, 0, 0, 2, 0x08, 1])


def probe(address, service):
    """The frame of the answer. Raises CalledProcessError when there is none."""
    message = bytes([0x0A, len(service)]) + service.encode()
    frame = bytes([0]) + len(message).to_bytes(4, "big") + message
    return subprocess.run(["curl", "-sS", "--fail", "--max-time", "5", "--http2-prior-knowledge", "-H", "content-type: application/grpc",
                           "-H", "te: trailers", "--data-binary", "@-", f"http://{address}/grpc.health.v1.Health/Check"],
                          input=frame, check=True, capture_output=True).stdout
