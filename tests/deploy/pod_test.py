"""The pod's command, run as the chart renders it: the server starts, is healthy on the probes' port, and ends with 0."""

import json
import pathlib
import signal
import subprocess
import tempfile
import unittest

import chart
from stack import LMHEAD, make_certificate, wait_for

# One for each way of security. What differs from a pod: the folders, ports that are free, and the processor in place of a GPU.
VALUE_SETS = ("cpu", "mutual-tls", "tokens-only")
TOKEN_DIGEST = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


# HealthCheckResponse{status: SERVING} in a gRPC frame.
SERVING = bytes([0, 0, 0, 0, 2, 0x08, 1])


def probe(address, service):
    """What the kubelet asks, by curl: the frame of the answer."""
    message = bytes([0x0A, len(service)]) + service.encode()
    frame = bytes([0]) + len(message).to_bytes(4, "big") + message
    return subprocess.run(["curl", "-sS", "--fail", "--max-time", "5", "--http2-prior-knowledge", "-H", "content-type: application/grpc",
                           "-H", "te: trailers", "--data-binary", "@-", f"http://{address}/grpc.health.v1.Health/Check"],
                          input=frame, check=True, capture_output=True).stdout


class PodCommand(unittest.TestCase):
    def mount(self, objects, container, root):
        """The pod's volumes as folders: {mount path: folder}."""
        folders = {}
        for mount in container["volumeMounts"]:
            folder = root / mount["name"]
            folder.mkdir()
            folders[mount["mountPath"]] = folder
        if "/etc/lmhead/tls" in folders:
            make_certificate(folders["/etc/lmhead/tls"])
        if "/etc/lmhead/policy" in folders:
            policy = next(o for o in chart.of_kind(objects, "ConfigMap") if o["metadata"]["name"].endswith("-policy"))
            (folders["/etc/lmhead/policy"] / "policy.json").write_text(policy["data"]["policy.json"])
        if "/etc/lmhead/tokens" in folders:
            names = {i["token"] for i in json.loads(policy["data"]["policy.json"])["identities"] if "token" in i}
            tokens = {"tokens": [{"name": name, "sha256": TOKEN_DIGEST} for name in names]}
            (folders["/etc/lmhead/tokens"] / "tokens.json").write_text(json.dumps(tokens))
        return folders

    def command(self, container, folders, ready):
        ports = {port["containerPort"] for port in container["ports"]}
        arguments = []
        for argument in container["args"]:
            for inside, folder in folders.items():
                argument = argument.replace("=" + inside, f"={folder}")
            for port in ports:
                argument = argument.replace(f"=0.0.0.0:{port}", "=127.0.0.1:0")
            arguments.append(argument.replace("--backend=cuda", "--backend=cpu"))
        return [LMHEAD, *arguments, f"--ready_file={ready}"]

    def check(self, name):
        objects = chart.rendered(chart.CHART / f"ci/{name}.yaml")
        container = next(chart.containers(objects))
        with tempfile.TemporaryDirectory(prefix="lmhead-pod-") as folder:
            root = pathlib.Path(folder)
            ready = root / "ready.json"
            with (root / "log").open("w+") as log:
                server = subprocess.Popen(self.command(container, self.mount(objects, container, root), ready), stderr=log)
                try:
                    def is_ready():
                        self.assertIsNone(server.poll(), (root / "log").read_text())
                        return ready.exists()

                    wait_for("lmhead serve", is_ready)
                    address = json.loads(ready.read_text())["health_address"]
                    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                        self.assertEqual(SERVING, probe(address, container[kind]["grpc"]["service"]), kind)
                    server.send_signal(signal.SIGTERM)
                    self.assertEqual(0, server.wait(timeout=30), (root / "log").read_text())
                finally:
                    if server.poll() is None:
                        server.kill()
                        server.wait()


for value_set in VALUE_SETS:
    setattr(PodCommand, "test_" + value_set.replace("-", "_"), lambda self, name=value_set: self.check(name))


if __name__ == "__main__":
    unittest.main()
