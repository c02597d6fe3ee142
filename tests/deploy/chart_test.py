"""What the chart renders: valid for Kubernetes, within policy, consistent with itself, and understood by the binary."""

import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

import helm_python as helm
import kubernetes_validate
import yaml

import chart

# The oldest release that the chart admits, as near as the validator has it, and the newest.
KUBERNETES_VERSIONS = ("1.27", "1.37")
# Kinds of operators: no schema comes with Kubernetes.
CUSTOM_KINDS = {"ServiceMonitor", "PrometheusRule", "LeaderWorkerSet"}
LMHEAD = os.environ.get("LMHEAD_BINARY", str(chart.ROOT / "build/bin/lmhead"))


class EachValueSet:
    """One class a file of ci/, below."""

    path = None

    def setUp(self):
        self.objects = chart.rendered(self.path)

    def test_lint(self):
        report = helm.lint(chart.CHART, yaml.safe_load(self.path.read_text()), strict=True)
        self.assertEqual([], [m for m in report["messages"] if m["severity"] >= 2] + report["errors"])

    def test_kubernetes_schemas(self):
        for o in self.objects:
            if o["kind"] in CUSTOM_KINDS:
                continue
            for version in KUBERNETES_VERSIONS:
                kubernetes_validate.validate(o, version, strict=True)

    def test_pods_are_confined(self):
        for _, template in chart.pod_templates(self.objects):
            spec = template["spec"]
            security = spec["securityContext"]
            self.assertIs(True, security["runAsNonRoot"])
            self.assertGreaterEqual(security["runAsUser"], 10000)
            self.assertEqual("RuntimeDefault", security["seccompProfile"]["type"])
            self.assertIs(False, spec["automountServiceAccountToken"])
            for key in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
                self.assertNotIn(key, spec)
            self.assertFalse([v for v in spec["volumes"] if "hostPath" in v])
        for container in chart.containers(self.objects):
            security = container["securityContext"]
            self.assertIs(True, security["readOnlyRootFilesystem"])
            self.assertIs(False, security["allowPrivilegeEscalation"])
            self.assertEqual({"drop": ["ALL"]}, security["capabilities"])
            self.assertNotIn("privileged", security)

    def test_resources_are_bounded(self):
        for container in chart.containers(self.objects):
            self.assertIn("memory", container["resources"]["limits"])
        for _, template in chart.pod_templates(self.objects):
            for volume in template["spec"]["volumes"]:
                if "emptyDir" in volume:
                    self.assertIn("sizeLimit", volume["emptyDir"], volume["name"])

    def test_images_are_pinned(self):
        for container in chart.containers(self.objects):
            self.assertRegex(container["image"], r"(:[\w][\w.-]*|@sha256:[0-9a-f]{64})$")
            self.assertFalse(container["image"].endswith(":latest"))

    def test_probes_ask_ports_that_are_there(self):
        for container in chart.servers(self.objects):
            ports = {port["containerPort"] for port in container["ports"]}
            for kind, service in (("startupProbe", "readiness"), ("readinessProbe", "readiness"), ("livenessProbe", "liveness")):
                self.assertEqual(service, container[kind]["grpc"]["service"])
                self.assertIn(container[kind]["grpc"]["port"], ports)

    def test_mounts_and_volumes_agree(self):
        for owner, template in chart.pod_templates(self.objects):
            spec = owner["spec"].get("leaderWorkerTemplate", owner["spec"])
            volumes = [v["name"] for v in template["spec"]["volumes"]]
            volumes += [c["metadata"]["name"] for c in spec.get("volumeClaimTemplates", [])]
            mounts = [m["name"] for c in template["spec"]["containers"] for m in c["volumeMounts"]]
            self.assertEqual(len(mounts), len(set(mounts)))
            # A claim that only the leader of a group uses is there for its followers, too.
            self.assertIn(set(volumes) - set(mounts), (set(), {"checkpoints"}))
            self.assertLessEqual(set(mounts), set(volumes))
            self.assertIn({"name": "shm", "mountPath": "/dev/shm"}, template["spec"]["containers"][0]["volumeMounts"])

    def test_selectors_and_ports_find_the_pods(self):
        templates = [template for _, template in chart.pod_templates(self.objects)]
        port_names = {port["name"] for c in chart.servers(self.objects) for port in c["ports"]}
        for o in self.objects:
            spec = o.get("spec", {})
            selector = {"StatefulSet": lambda: spec["selector"]["matchLabels"], "Service": lambda: spec["selector"],
                        "PodDisruptionBudget": lambda: spec["selector"]["matchLabels"],
                        "NetworkPolicy": lambda: spec["podSelector"]["matchLabels"]}.get(o["kind"])
            if selector:
                for template in templates:
                    self.assertLessEqual(selector().items(), template["metadata"]["labels"].items(), o["kind"])
        for service in chart.of_kind(self.objects, "Service"):
            self.assertEqual("None", service["spec"]["clusterIP"])
            self.assertLessEqual({port["targetPort"] for port in service["spec"]["ports"]}, port_names)
        for policy in chart.of_kind(self.objects, "NetworkPolicy"):
            self.assertLessEqual({p["port"] for rule in policy["spec"]["ingress"] for p in rule.get("ports", [])
                                  if isinstance(p["port"], str)}, port_names)
        for monitor in chart.of_kind(self.objects, "ServiceMonitor"):
            service = chart.of_kind(self.objects, "Service")[0]
            self.assertLessEqual(monitor["spec"]["selector"]["matchLabels"].items(), service["metadata"]["labels"].items())
            self.assertLessEqual({e["port"] for e in monitor["spec"]["endpoints"]},
                                 {port["name"] for port in service["spec"]["ports"]})

    def test_names_fit_and_objects_are_in_the_release_s_namespace(self):
        names = [(o["kind"], o["metadata"]["name"]) for o in self.objects]
        self.assertEqual(len(names), len(set(names)))
        for o in self.objects:
            self.assertEqual("training", o["metadata"]["namespace"])
            self.assertLessEqual(len(o["metadata"]["name"]), 63)
            self.assertEqual("lmhead", o["metadata"]["labels"]["app.kubernetes.io/instance"])
        for _, template in chart.pod_templates(self.objects):
            for value in template["metadata"]["labels"].values():
                self.assertLessEqual(len(value), 63)

    def test_the_pod_outlives_its_drain(self):
        for _, template in chart.pod_templates(self.objects):
            for container in template["spec"]["containers"]:
                if container["args"][0] != "serve":
                    continue  # A follower ends with its leader.
                drain = [a for a in container["args"] if re.match(r"--(shutdown|drain)_timeout_seconds=", a)]
                self.assertEqual(1, len(drain))
                self.assertLessEqual(int(drain[0].split("=")[1]) + 15, template["spec"]["terminationGracePeriodSeconds"])


for value_set in chart.VALUE_SETS:
    name = "ValueSet_" + value_set.stem.replace("-", "_")
    globals()[name] = type(name, (EachValueSet, unittest.TestCase), {"path": value_set})


class Flags(unittest.TestCase):
    """A pod that is given a flag which the binary does not know would never start."""

    @classmethod
    def setUpClass(cls):
        cls.known = {}

    def flags_of(self, command):
        if command not in self.known:
            text = subprocess.run([LMHEAD, command, "--help"], check=True, capture_output=True, text=True).stdout
            self.known[command] = set(re.findall(r"^  --(\w+)  \(default: ", text, re.M))
            self.assertTrue(self.known[command], f"lmhead {command} --help lists no flags: {text}")
        return self.known[command]

    def check(self, arguments):
        command, *flags = arguments
        for flag in flags:
            if flag == "$LMHEAD_FLAGS":
                continue
            match = re.match(r"--(\w+)=", flag)
            self.assertTrue(match, f"{flag} has not the form --name=value")
            self.assertIn(match[1], self.flags_of(command), f"lmhead {command} has no such flag")

    def test_of_every_value_set(self):
        for path in chart.VALUE_SETS:
            with self.subTest(path.stem):
                for container in chart.containers(chart.rendered(path)):
                    self.check(container["args"])

    def test_of_the_unit_the_images_and_compose(self):
        unit = (chart.ROOT / "deploy/systemd/lmhead.service").read_text()
        start = re.search(r"^ExecStart=\S*/lmhead ((?:.*\\\n)*.*)$", unit, re.M)[1].replace("\\\n", " ")
        self.check(start.split())
        for name in ("Dockerfile", "Dockerfile.cpu"):
            text = (chart.ROOT / "docker" / name).read_text()
            for words in re.findall(r'(?:CMD) \[(?:"lmhead", )?(.*)\]', text):
                self.check([word.strip('" ') for word in words.split(",")])
        services = yaml.safe_load((chart.ROOT / "docker/compose.yaml").read_text())["services"]
        for service in services.values():
            if service["image"].startswith("lmhead:"):
                self.check(service["command"])


# What an installation has to say; the other values are the defaults.
LEAST = {"security": {"insecure": True}}


class Values(unittest.TestCase):
    @staticmethod
    def render(values, **release):
        return chart.render(LEAST | values, **release)

    def test_there_are_enough_sets(self):
        self.assertGreaterEqual(len(chart.VALUE_SETS), 6)

    def refused(self, values, word):
        with self.assertRaises(helm.HelmError) as raised:
            self.render(values)
        self.assertIn(word, str(raised.exception))

    def test_typing_errors_are_refused(self):
        self.refused({"replica": 2}, "replica")
        self.refused({"gpu": {"count": "two"}}, "count")
        self.refused({"image": {"tag": "latest"}}, "tag")
        self.refused({"image": {"digest": "sha256:abc"}}, "digest")
        self.refused({"resources": {"limits": None}}, "limits")
        self.refused({"flags": {"batchTokens": 1}}, "batchTokens")

    def test_flags_that_the_chart_owns_are_refused(self):
        self.refused({"flags": {"listen": "0.0.0.0:1"}}, "additional properties 'listen' not allowed")

    def test_flags_are_the_server_s(self):
        """Each flag of serve is either in the schema, or the chart sets it by itself."""
        schema = json.loads((chart.CHART / "values.schema.json").read_text())["properties"]["flags"]["properties"]
        text = subprocess.run([LMHEAD, "serve", "--help"], check=True, capture_output=True, text=True).stdout
        flags = set(re.findall(r"^  --(\w+)  \(default: ", text, re.M))
        set_by_itself = {"auth_policy_file", "auth_token_file", "backend", "checkpoint_dir", "checkpoint_keep", "collective_host", "devices",
                         "drain_timeout_seconds", "group_listen", "health_listen", "insecure", "listen", "local_ranks", "metrics_listen",
                         "ranks", "ready_file", "replicas", "restore", "tls_cert_file", "tls_client_ca_file", "tls_key_file"}
        self.assertEqual(flags - set_by_itself, set(schema))

    def test_bounds_of_flags_are_the_server_s(self):
        schema = json.loads((chart.CHART / "values.schema.json").read_text())["properties"]["flags"]["properties"]

        def complaint(flag, value):
            result = subprocess.run([LMHEAD, "doctor", "--json", "--backend=cpu", "--listen=127.0.0.1:0", f"--{flag}={value}"],
                                    capture_output=True, text=True)
            return [f["what"] for f in json.loads(result.stdout)["findings"] if f["check"] == "flags"]

        # More streams than slots have a message of their own.
        numbers = {name: rule for name, rule in schema.items() if "minimum" in rule and name != "max_streams"}
        self.assertGreater(len(numbers), 5)
        for name, rule in numbers.items():
            with self.subTest(name):
                for value in (rule["minimum"], rule["maximum"]):
                    self.assertEqual([], complaint(name, value))
                below = rule["minimum"] - (1 if isinstance(rule["minimum"], int) else 0.05)
                for value in (below, rule["maximum"] + 1):
                    self.assertTrue(complaint(name, value), value)
                    self.refused({"flags": {name: value}}, name)
        for name, rule in schema.items():
            for word in [w for w in rule.get("enum", []) if isinstance(w, str)]:
                self.assertEqual([], complaint(name, word))
        self.assertTrue(complaint("log_level", "loud"))
        self.refused({"flags": {"log_level": "loud"}}, "log_level")

    def test_values_that_make_no_sense_together_are_refused(self):
        tls = {"tls": {"secretName": "s"}}
        admin, token = {"name": "a", "roles": ["admin"]}, {"token": "a", "roles": ["shard"]}
        for values, message in (
            ({"ports": {"metrics": 50051}}, "ports: grpc and metrics are both 50051"),
            ({"hostGroup": {"rollOut": True}}, "wanted hosts above 1"),
            ({"hostGroup": {"exclusiveTopology": "rack"}}, "wanted hosts above 1"),
            ({"flags": {"max_streams": 17}}, "flags.max_streams: got 17, wanted at most flags.staging_slots, 16"),
            ({"sharedMemory": {"sizeLimit": "8.5Gi"}}, "sharedMemory.sizeLimit: got 8.5Gi"),
            ({"resources": {"limits": {"memory": 4294967296}}}, "resources.requests.memory: it is above resources.limits.memory"),
            ({"serviceMonitor": {"interval": "5s"}}, "serviceMonitor.scrapeTimeout: got 10s, wanted at most serviceMonitor.interval, 5s"),
            ({"security": tls | {"policy": {"identities": [token]}}}, "wanted tokensSecretName"),
            ({"security": {"tls": {"secretName": "s", "clientCertificates": False}, "tokensSecretName": "t",
                           "policy": {"identities": [admin]}}}, "wanted tls.clientCertificates"),
            ({"security": tls | {"policy": {"identities": [admin, admin]}}}, "name a is listed twice"),
            # Followers show a certificate, never a token.
            ({"hosts": 2, "security": tls | {"tokensSecretName": "t", "policy": {"identities": [token]}}}, "needs role shard"),
        ):
            with self.subTest(message):
                self.refused(values, message)
        with self.assertRaisesRegex(helm.HelmError, "a letter first"):
            self.render({}, name="1st")
        self.render({"serviceMonitor": {"interval": "1m30s", "scrapeTimeout": "1m"}, "flags": {"max_streams": 17, "staging_slots": 17},
                     "resources": {"limits": {"memory": "1.5Gi"}, "requests": {"cpu": 0.5, "memory": 1073741824}}})

    def test_values_that_kubernetes_would_refuse_are_refused(self):
        for values, word in (
            ({"podLabels": {"app.kubernetes.io/name": "x"}}, "app.kubernetes.io/name"),
            ({"podLabels": {"team": "a b"}}, "podLabels/team"),
            ({"podDisruptionBudget": {"maxUnavailable": "150%"}}, "maxUnavailable"),
            ({"image": {"repository": "registry/lmhead:1.0"}}, "repository"),
            ({"image": {"tag": "a b"}}, "tag"),
            ({"gpu": {"resource": "gpu"}}, "resource"),
            ({"fullnameOverride": "9lives"}, "fullnameOverride"),
            ({"checkpoints": {"size": "0"}}, "size"),
            ({"resources": {"limits": {"memory": "much"}}}, "memory"),
            ({"security": {"tls": {"secretName": "My Secret"}}}, "secretName"),
            ({"serviceMonitor": {"interval": "0s"}}, "interval"),
            ({"networkPolicy": {"trainers": [{}]}}, "trainers"),
            ({"extraEnv": [{"value": "x"}]}, "name"),
        ):
            with self.subTest(word):
                self.refused(values, word)
        self.render({"image": {"repository": "localhost:5000/team/lmhead"}})

    def test_security_has_to_be_chosen_and_to_fit_together(self):
        tls = {"secretName": "s"}
        for security, message in (
            ({}, "set tls.secretName, or insecure: true"),
            ({"insecure": True, "tls": tls}, "exclude each other"),
            ({"insecure": True, "tokensSecretName": "t"}, "need tls.secretName"),
            ({"insecure": True, "policy": {"identities": [{"name": "a", "roles": ["admin"]}]}}, "need tls.secretName"),
            ({"tls": tls | {"clientCertificates": False}, "policy": {"identities": [{"name": "a", "roles": ["admin"]}]}},
             "needs identities to judge"),
            ({"tls": tls, "policy": {"identities": [{"name": "a", "roles": ["root"]}]}}, "roles"),
            ({"tls": tls, "policy": {"identities": [{"name": "a", "token": "b", "roles": ["admin"]}]}}, "identities"),
            ({"tls": tls, "policy": {"identities": [{"name": "a", "roles": ["trunk"]}]}}, "workers"),
        ):
            with self.subTest(message):
                self.refused({"security": security}, message)

    def test_followers_have_what_the_leader_asks_for(self):
        def several(security):
            return {"hosts": 2, "security": {"tls": {"secretName": "s"}} | security}
        admin = {"name": "a", "roles": ["admin"]}
        self.refused(several({"policy": {"identities": [admin]}}), "needs role shard")
        self.refused(several({"tls": {"secretName": "s", "clientCertificates": False}, "tokensSecretName": "t"}), "and no token")
        self.render(several({"policy": {"identities": [admin, {"name": "lmhead-0.lmhead", "roles": ["shard"]}]}}))

    def test_the_policy_is_the_one_in_the_values(self):
        policy = {"identities": [{"name": "spiffe://a/b", "roles": ["trunk"], "workers": ["w-*"]}]}
        objects = self.render({"security": {"tls": {"secretName": "s"}, "policy": policy}})
        config = next(o for o in chart.of_kind(objects, "ConfigMap") if o["metadata"]["name"] == "lmhead-policy")
        self.assertEqual(policy, json.loads(config["data"]["policy.json"]))
        volumes = chart.of_kind(objects, "StatefulSet")[0]["spec"]["template"]["spec"]["volumes"]
        self.assertIn({"name": "policy", "configMap": {"name": "lmhead-policy"}}, volumes)

    def test_secrets_are_mounted_whole(self):
        """A subPath would never see the renewed certificate."""
        for path in chart.VALUE_SETS:
            for container in chart.containers(chart.rendered(path)):
                self.assertFalse([m for m in container["volumeMounts"] if "subPath" in m or "subPathExpr" in m])

    def test_a_default_flag_can_be_taken_away(self):
        self.assertIn("--log_format=json", next(chart.containers(self.render({})))["args"])
        arguments = next(chart.containers(self.render({"flags": {"log_format": None}})))["args"]
        self.assertFalse([a for a in arguments if "log_format" in a])

    def test_checkpoints_outlive_the_release(self):
        spec = chart.of_kind(self.render({"checkpoints": {"enabled": True}}), "StatefulSet")[0]["spec"]
        self.assertEqual({"whenDeleted": "Retain", "whenScaled": "Retain"}, spec["persistentVolumeClaimRetentionPolicy"])
        self.assertIn("--checkpoint_dir=/checkpoints", spec["template"]["spec"]["containers"][0]["args"])

    def test_a_pod_that_would_be_killed_in_its_drain_is_refused(self):
        self.refused({"drainTimeoutSeconds": 300}, "terminationGracePeriodSeconds: got 300, wanted at least 315")

    def test_large_numbers_are_not_written_as_powers(self):
        objects = self.render({"flags": {"chunk_bytes_max": 8388608, "memory_limit_bytes": 137438953472, "write_timeout_seconds": 2.5,
                                          "reflection": True}})
        arguments = next(chart.containers(objects))["args"]
        for flag in ("--chunk_bytes_max=8388608", "--memory_limit_bytes=137438953472", "--write_timeout_seconds=2.5",
                     "--reflection=true"):
            self.assertIn(flag, arguments)

    def test_a_gpu_is_asked_for_and_tolerated_only_when_there_is_one(self):
        pod = chart.of_kind(self.render({"gpu": {"count": 1}}), "StatefulSet")[0]["spec"]["template"]["spec"]
        self.assertEqual(1, pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
        self.assertIn("--backend=cuda", pod["containers"][0]["args"])
        self.assertEqual("nvidia.com/gpu", pod["tolerations"][0]["key"])
        pod = chart.of_kind(self.render({"gpu": {"count": 0}}), "StatefulSet")[0]["spec"]["template"]["spec"]
        self.assertNotIn("nvidia.com/gpu", pod["containers"][0]["resources"]["limits"])
        self.assertIn("--backend=cpu", pod["containers"][0]["args"])
        self.assertNotIn("tolerations", pod)

    def test_several_gpus_are_ranks(self):
        pod = chart.of_kind(self.render({"gpu": {"count": 4}}), "StatefulSet")[0]["spec"]["template"]["spec"]
        self.assertEqual(4, pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
        self.assertIn("--devices=0,1,2,3", pod["containers"][0]["args"])

    def test_replicas_of_heads_share_the_ranks(self):
        for values, replicas in (({"gpu": {"count": 4}}, 2), ({"hosts": 2, "gpu": {"count": 4}}, 8), ({"hosts": 2, "gpu": {"count": 0}}, 2)):
            server = chart.servers(self.render(values | {"headReplicas": replicas}))[0]
            self.assertIn(f"--replicas={replicas}", server["args"])
        self.assertFalse([a for a in chart.servers(self.render({"gpu": {"count": 4}}))[0]["args"] if a.startswith("--replicas")])
        self.refused({"gpu": {"count": 4}, "headReplicas": 3}, "headReplicas: got 3, wanted a divisor of hosts * gpu.count, 4")
        self.refused({"headReplicas": 2}, "headReplicas: got 2, wanted a divisor of hosts * gpu.count, 1")
        self.refused({"flags": {"replicas": 2}}, "additional properties 'replicas' not allowed")

    def test_names_are_stable(self):
        """A trainer has the pod's name in its settings, so neither a version nor another value may change it."""
        first = chart.of_kind(self.render({}, name="prod"), "StatefulSet")[0]
        other = chart.of_kind(self.render({"image": {"tag": "9.9.9"}, "flags": {"staging_slots": 32}}, name="prod"), "StatefulSet")[0]
        for o in (first, other):
            self.assertEqual("prod-lmhead", o["metadata"]["name"])
            self.assertEqual("prod-lmhead", o["spec"]["serviceName"])
        self.assertEqual(first["spec"]["selector"], other["spec"]["selector"])

    def test_the_version_is_the_project_s(self):
        cmake = (chart.ROOT / "CMakeLists.txt").read_text()
        metadata = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
        self.assertEqual(re.search(r"project\(lmhead VERSION ([\d.]+)", cmake)[1], metadata["appVersion"])

    def test_runbooks_can_be_links(self):
        objects = self.render({"prometheusRule": {"enabled": True, "runbookBase": "https://git.example/x/"}})
        rules = [r for g in chart.of_kind(objects, "PrometheusRule")[0]["spec"]["groups"] for r in g["rules"] if "alert" in r]
        for rule in rules:
            self.assertRegex(rule["annotations"]["runbook_url"], r"^https://git\.example/x/docs/OPERATING\.md#\w+$")


class Hosts(unittest.TestCase):
    """The LeaderWorkerSet: no schema comes with Kubernetes, so what its API says is checked here."""

    def setUp(self):
        self.objects = chart.rendered(chart.CHART / "ci/four-hosts.yaml")
        self.set = chart.of_kind(self.objects, "LeaderWorkerSet")[0]
        self.template = self.set["spec"]["leaderWorkerTemplate"]

    def test_fields_are_the_api_s(self):
        self.assertEqual("leaderworkerset.x-k8s.io/v1", self.set["apiVersion"])
        self.assertLessEqual(set(self.set["spec"]), {"replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy",
                                                     "networkConfig"})
        self.assertLessEqual(set(self.template), {"leaderTemplate", "workerTemplate", "size", "restartPolicy", "subGroupPolicy",
                                                  "volumeClaimTemplates", "persistentVolumeClaimRetentionPolicy"})
        # The pods and claims are Kubernetes' own kinds: as a StatefulSet they have a schema.
        for key in ("leaderTemplate", "workerTemplate"):
            labels = self.template[key]["metadata"]["labels"]
            kubernetes_validate.validate(
                {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "a"},
                 "spec": {"serviceName": "a", "selector": {"matchLabels": labels}, "template": self.template[key],
                          "volumeClaimTemplates": self.template["volumeClaimTemplates"]}}, KUBERNETES_VERSIONS[-1], strict=True)

    def test_it_is_instead_of_a_stateful_set(self):
        self.assertEqual([], chart.of_kind(self.objects, "StatefulSet"))
        self.assertEqual([], chart.of_kind(chart.rendered(chart.CHART / "ci/one-gpu.yaml"), "LeaderWorkerSet"))

    def test_the_group_lives_and_dies_together(self):
        self.assertEqual(4, self.template["size"])
        self.assertEqual("RecreateGroupOnPodRestart", self.template["restartPolicy"])
        self.assertEqual(self.set["spec"]["replicas"], self.set["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]["partition"])

    def test_one_leads_and_the_others_follow_it(self):
        leader, follower = (self.template[key]["spec"]["containers"][0]["args"] for key in ("leaderTemplate", "workerTemplate"))
        self.assertEqual("serve", leader[0])
        for flag in ("--ranks=32", "--local_ranks=8", "--devices=0,1,2,3,4,5,6,7", "--group_listen=0.0.0.0:50053"):
            self.assertIn(flag, leader)
        self.assertEqual("follow", follower[0])
        for flag in ("--leader=$(LWS_LEADER_ADDRESS):50053", "--local_ranks=8", "--devices=0,1,2,3,4,5,6,7"):
            self.assertIn(flag, follower)

    def test_followers_take_the_ranks_after_their_predecessors(self):
        container = self.template["workerTemplate"]["spec"]["containers"][0]
        shell, dash_c, script, *rest = container["command"]
        for index, rank in ((1, 8), (3, 24)):
            echo = script.replace("exec lmhead", "printf '%s\\n'")
            result = subprocess.run([shell, dash_c, echo, *rest, "follow", "--x=1"], check=True, capture_output=True, text=True,
                                    env={"LWS_WORKER_INDEX": str(index)})
            self.assertEqual(["follow", "--x=1", f"--rank={rank}"], result.stdout.split())

    def test_its_network_lets_the_group_speak(self):
        policy = chart.of_kind(self.objects, "NetworkPolicy")[0]["spec"]
        group = {"podSelector": policy["podSelector"]}
        self.assertIn(group, [peer for rule in policy["ingress"] for peer in rule["from"]])
        self.assertIn(group, [peer for rule in policy["egress"] for peer in rule["to"]])


class PlainManifests(unittest.TestCase):
    def run_it(self, *arguments):
        return subprocess.run([sys.executable, chart.ROOT / "deploy/manifests.py", *map(str, arguments)], capture_output=True, text=True)

    def test_they_are_what_helm_renders(self):
        path = chart.CHART / "ci/monitored.yaml"
        result = self.run_it("-f", path, "--namespace", "training")
        self.assertEqual(0, result.returncode, result.stderr)
        self.assertEqual(chart.rendered(path), [d for d in yaml.safe_load_all(result.stdout) if d])

    def test_later_values_win(self):
        result = self.run_it("-f", chart.CHART / "ci/cpu.yaml", "-f", chart.CHART / "ci/foreign-account.yaml")
        self.assertEqual(0, result.returncode, result.stderr)
        container = next(chart.containers([d for d in yaml.safe_load_all(result.stdout) if d]))
        self.assertIn("--backend=cpu", container["args"])
        self.assertIn("--listen=0.0.0.0:8443", container["args"])

    def test_refused_values_say_so(self):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write("replica: 2\n")
            file.flush()
            result = self.run_it("-f", file.name)
        self.assertEqual(1, result.returncode)
        self.assertIn("replica", result.stderr)


if __name__ == "__main__":
    unittest.main()
