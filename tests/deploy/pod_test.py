"""The pod's command, run as the chart renders it: the server starts, is healthy on the probes' port, and ends with 0."""

import json
import os
import pathlib
import signal
import subprocess
import tempfile
import unittest
import urllib.request

import chart
from health import SERVING, probe
from stack import LMHEAD, free_port, make_certificate, wait_for

# One for each way of security. What differs from a pod: the folders, ports that are free, and the processor in place of a GPU.
VALUE_SETS = ("cpu", "mutual-tls", "tokens-only")
TOKEN_DIGEST = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


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
            if not argument.startswith("--devices="):
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


class HostGroup(unittest.TestCase):
    """A LeaderWorkerSet of two hosts without GPUs, as two processes: a trainer's head is split over both, or each has it."""

    def start(self, container, folder, name, **variables):
        # What Kubernetes and the operator put in.
        variables |= {"POD_IP": "127.0.0.1", "LWS_LEADER_ADDRESS": "127.0.0.1"}
        command = [LMHEAD if word == "lmhead" else word.replace("exec lmhead", f"exec {LMHEAD}")
                   for word in container.get("command", ["lmhead"])] + container["args"]
        for variable, value in variables.items():
            command = [word.replace(f"$({variable})", value) for word in command]
        command = [word.replace("=0.0.0.0:", "=127.0.0.1:") for word in command]
        with (folder / f"{name}.log").open("w") as log:
            program = subprocess.Popen(command, stderr=log, env=dict(os.environ, OMP_WAIT_POLICY="PASSIVE", **variables))
        self.addCleanup(program.wait)
        self.addCleanup(program.kill)
        return program

    def test_a_head_over_both(self):
        self.check_it_trains_and_ends({}, 'lmhead_memory_limit_bytes{rank="1"}')

    def test_a_head_on_each(self):
        self.check_it_trains_and_ends({"headReplicas": 2}, 'lmhead_replica_tokens_total{replica="1"}')

    def check_it_trains_and_ends(self, values, metric):
        """The metric, of the second host, has to be above 0."""
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="lmhead-group-")))
        ports = {name: free_port() for name in ("grpc", "metrics", "health", "group")}
        objects = chart.render({"hosts": 2, "gpu": {"count": 0}, "ports": ports, "security": {"insecure": True}} | values)
        template = chart.of_kind(objects, "LeaderWorkerSet")[0]["spec"]["leaderWorkerTemplate"]
        leader, follower = (template[key]["spec"]["containers"][0] for key in ("leaderTemplate", "workerTemplate"))
        programs = [self.start(leader, folder, "leader"), self.start(follower, folder, "follower", LWS_WORKER_INDEX="1")]

        def logs():
            return "".join((folder / f"{name}.log").read_text() for name in ("leader", "follower"))

        def is_ready():
            self.assertEqual([None, None], [program.poll() for program in programs], logs())
            try:
                return probe(f"127.0.0.1:{ports['health']}", "readiness") == SERVING
            except subprocess.CalledProcessError:
                return False

        wait_for("the group", is_ready, seconds=60)
        demo = subprocess.run([LMHEAD, "demo", f"--address=127.0.0.1:{ports['grpc']}", "--steps=20"], capture_output=True, text=True,
                              timeout=100)
        # 1: not as good as the demo wants it, after so few steps.
        self.assertIn(demo.returncode, (0, 1), demo.stdout + demo.stderr + logs())
        with urllib.request.urlopen(f"http://127.0.0.1:{ports['metrics']}/metrics", timeout=10) as answer:
            values = [line.rpartition(" ")[2] for line in answer.read().decode().splitlines() if line.startswith(metric)]
        self.assertEqual(1, len(values))
        self.assertGreater(float(values[0]), 0)
        for program in programs:
            program.send_signal(signal.SIGTERM)
            self.assertEqual(0, program.wait(timeout=60), logs())


for value_set in VALUE_SETS:
    setattr(PodCommand, "test_" + value_set.replace("-", "_"), lambda self, name=value_set: self.check(name))


if __name__ == "__main__":
    unittest.main()
