"""A real server with TLS on both ends, under load, that a real Prometheus scrapes, on free ports of the loopback.

    with Stack() as stack:
        stack.query("lmhead_tokens_total")
"""

import contextlib
import json
import math
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

import chart

LMHEAD = os.environ.get("LMHEAD_BINARY", str(chart.ROOT / "build/bin/lmhead"))
RULES = chart.ROOT / "deploy/prometheus/rules.yaml"
# As Kubernetes would label the series.
LABELS = {"namespace": "training", "pod": "lmhead-0"}
START_SECONDS = 30


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(what, ready, seconds=START_SECONDS):
    end = time.time() + seconds
    while time.time() < end:
        result = ready()
        if result:
            return result
        time.sleep(0.1)
    raise TimeoutError(f"{what}: not within {seconds} s")


@contextlib.contextmanager
def serving(flags, folder, lmhead=LMHEAD):
    """`lmhead serve` with the flags, in the folder and with its log there, server.log: its address. SIGTERM ends it, with exit code 0."""
    ready, log = folder / "ready.json", folder / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen([lmhead, "serve", *flags, f"--ready_file={ready}"], cwd=folder, stdout=output, stderr=output)

    def address():
        assert server.poll() is None, f"lmhead serve ended with {server.returncode}: {log.read_text()}"
        return ready.exists() and json.loads(ready.read_text())["address"]

    try:
        yield wait_for("lmhead serve", address)
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=START_SECONDS)
        assert code == 0, f"lmhead serve ended with {code} on SIGTERM: {log.read_text()}"
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def make_certificate(folder):
    """A certificate for this machine that vouches for itself: tls.crt, tls.key, and as ca.crt once more."""
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30",
                    "-subj", "/CN=lmhead", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "tls.key", "-out", "tls.crt"],
                   check=True, capture_output=True, cwd=folder)
    shutil.copy(folder / "tls.crt", folder / "ca.crt")


class Stack:
    """Programs are ended in the opposite order of their start."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="lmhead-stack-")
        self.programs = []
        self.end = None  # Of the load: queries look at that moment, however much later they are asked.

    def __enter__(self):
        try:
            self.server = self.start_server()
            self.prometheus = self.start_prometheus()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for program in reversed(self.programs):
            if program.poll() is None:
                program.send_signal(signal.SIGTERM)
                try:
                    program.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    program.kill()
                    program.wait()
        self.folder.cleanup()

    def path(self, name):
        return pathlib.Path(self.folder.name, name)

    def start(self, arguments, log):
        with self.path(log).open("w") as output:
            program = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT, cwd=self.folder.name,
                                       env=dict(os.environ, OMP_WAIT_POLICY="PASSIVE"))
        self.programs.append(program)
        return program

    def start_server(self):
        ready = self.path("ready.json")
        make_certificate(self.path("."))
        files = [f"--tls_cert_file={self.path('tls.crt')}", f"--tls_key_file={self.path('tls.key')}"]
        self.client_tls = [*files, f"--tls_ca_file={self.path('ca.crt')}"]
        program = self.start([LMHEAD, "serve", "--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0", "--backend=cpu",
                              "--ranks=2", "--replicas=2", f"--checkpoint_dir={self.path('checkpoints')}",
                              *files, f"--tls_client_ca_file={self.path('ca.crt')}", f"--ready_file={ready}"], "server.log")

        def address():
            if program.poll() is not None:
                raise RuntimeError("lmhead serve ended: " + self.path("server.log").read_text())
            return json.loads(ready.read_text()) if ready.exists() else None

        return wait_for("lmhead serve", address)

    def start_prometheus(self):
        config = {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": [str(RULES)],
                  "scrape_configs": [{"job_name": "lmhead", "static_configs": [
                      {"targets": [self.server["metrics_address"]], "labels": LABELS}]}]}
        self.path("prometheus.json").write_text(json.dumps(config))  # JSON is YAML.
        address = f"127.0.0.1:{free_port()}"
        self.start(["prometheus", f"--config.file={self.path('prometheus.json')}", f"--storage.tsdb.path={self.path('data')}",
                    f"--web.listen-address={address}"], "prometheus.log")

        def is_ready():
            try:
                with urllib.request.urlopen(f"http://{address}/-/ready", timeout=1) as answer:
                    return answer.status == 200
            except OSError:
                return False

        wait_for("prometheus", is_ready)
        return address

    def load(self, seconds):
        """A trainer for at least so long; each run is a head of its own that is trained and deleted."""
        end = time.time() + seconds
        while time.time() < end:
            program = self.start([LMHEAD, "demo", f"--address={self.server['address']}", *self.client_tls, "--steps=60"],
                                 "demo.log")
            # A head of its own, whose name is made of the process's.
            while program.poll() is None and not self.save(f"demo-{program.pid}"):
                time.sleep(0.2)
            program.wait(timeout=120)
            # 1: the model did not get as good as the demo wants it, after so few steps; its work was done all the same.
            if program.returncode not in (0, 1):
                raise RuntimeError(f"lmhead demo: status {program.returncode}: " + self.path("demo.log").read_text())
        self.end = time.time()

    def save(self, head):
        """SaveCheckpoint of a head; whether it was done. One message of gRPC by curl, which is no more than a frame of HTTP/2."""
        name = head.encode()
        message = self.path("save.bin")
        field = bytes([0x0a, len(name)]) + name  # SaveCheckpointRequest.head
        message.write_bytes(b"\0" + len(field).to_bytes(4, "big") + field)
        tls = ["--cacert", self.path("ca.crt"), "--cert", self.path("tls.crt"), "--key", self.path("tls.key")]
        answer = subprocess.run(["curl", "-s", "--http2", "--max-time", "20", *tls, "-H", "content-type: application/grpc", "-H", "te: trailers",
                                 "--data-binary", f"@{message}", "-D", "-", "-o", self.path("saved.bin"),
                                 f"https://{self.server['address']}/lmhead.v1.LmHeadService/SaveCheckpoint"],
                                capture_output=True, text=True)
        return re.search(r"^grpc-status: 0\s*$", answer.stdout, re.M) is not None

    def get(self, call, **arguments):
        url = f"http://{self.prometheus}/api/v1/{call}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise RuntimeError(f"{arguments}: {error.read().decode()}") from None

    def query(self, expression):
        """[(labels, value)] at the end of the load, without what is not a number."""
        result = self.get("query", query=expression, time=self.end)["result"]
        return [(r["metric"], float(r["value"][1])) for r in result if math.isfinite(float(r["value"][1]))]

    def query_range(self, expression, seconds, step=1):
        """[(labels, [(time, value)])] over the last so many seconds of the load, without what is not a number."""
        result = self.get("query_range", query=expression, start=self.end - seconds, end=self.end, step=step)["result"]
        series = [(r["metric"], [(float(t), float(v)) for t, v in r["values"] if math.isfinite(float(v))]) for r in result]
        return [(labels, values) for labels, values in series if values]

    def metric_names(self):
        return set(self.get("label/__name__/values"))
