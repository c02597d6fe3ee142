"""The manuals by the program itself: flags that they name exist, what they show can be pasted, links lead somewhere."""

import json
import pathlib
import re
import shlex
import subprocess
import tempfile
import unittest

import yaml

import chart
from manual import OPERATING, block, blocks
from stack import LMHEAD, serving

ROOT = chart.ROOT
MANUALS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
BENCH = pathlib.Path(LMHEAD).with_name("lmhead-bench")
# Of other programs.
FOREIGN_FLAGS = {"gtest_brief", "gtest_filter", "gtest_repeat"}


def commands(text):
    """Command lines of a block: comments dropped, continued lines joined, split at && and |."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in joined.splitlines():
        line = re.sub(r"(^|\s)#.*$", "", line)
        for command in re.split(r"&&|\||\$\(|;", line):
            try:
                yield shlex.split(command)
            except ValueError:  # Part of something quoted.
                continue


class Flags(unittest.TestCase):
    """A flag in a manual that the program does not have costs its reader an hour."""

    @classmethod
    def setUpClass(cls):
        usage = cls.run_help(LMHEAD, "--help")
        cls.known = {("lmhead", name): cls.flags_of(LMHEAD, name, "--help") for name in re.findall(r"^  (\w+)  ", usage, re.M)}
        cls.known[("lmhead-bench", "")] = cls.flags_of(BENCH, "--help")
        assert all(cls.known.values()) and len(cls.known) > 5, cls.known

    @staticmethod
    def run_help(*command):
        return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout

    @classmethod
    def flags_of(cls, *command):
        return set(re.findall(r"^  --(\w+)  \(default: ", cls.run_help(*command), re.M)) | {"help", "version"}

    def check(self, words, where):
        program = pathlib.Path(words[0]).name
        key = (program, words[1] if program == "lmhead" and len(words) > 1 else "")
        if program not in ("lmhead", "lmhead-bench") or key[1].startswith("-") or key[1].isupper():
            return 0
        self.assertIn(key, self.known, f"{where}: {shlex.join(words)}")
        for word in words[1:]:
            if match := re.match(r"--([a-z]\w*)", word):
                self.assertIn(re.sub("^no(?=[a-z])", "", match[1]) if match[1] not in self.known[key] else match[1], self.known[key],
                              f"{where}: {shlex.join(words)}")
        return 1

    def test_of_command_lines(self):
        checked = 0
        for path in MANUALS:
            for heading, text in blocks(path.read_text()):
                for words in commands(text):
                    if words:
                        checked += self.check(words, f"{path.name}, {heading}")
        self.assertGreater(checked, 20)

    def test_of_sentences(self):
        known = set().union(*self.known.values()) | FOREIGN_FLAGS
        files = MANUALS + [path for folder in ("deploy", "docker") for path in sorted((ROOT / folder).rglob("*"))
                           if path.is_file() and path.name not in ("lmhead.json", "dashboard.json")]
        checked = set()
        for path in files:
            for flag in re.findall(r"(?<![\w-])--([a-z0-9]+(?:_[a-z0-9]+)+)\b", path.read_text()):
                self.assertIn(flag, known, path)
                checked.add(flag)
        self.assertGreater(len(checked), 30)

    def test_every_flag_that_bounds_a_server_is_named(self):
        """In OPERATING.md, where an operator looks for what to turn."""
        text = OPERATING.read_text()
        silent = {flag for flag in self.known[("lmhead", "serve")] - {"help", "version"} if not re.search(rf"--{flag}\b", text)}
        self.assertEqual(set(), silent)


class Links(unittest.TestCase):
    @staticmethod
    def anchors(path):
        """As the usual renderers of Markdown make them of headings."""
        headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S), re.M)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    def test_lead_somewhere(self):
        checked = 0
        for path in MANUALS:
            for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
                if "://" in target:
                    continue
                name, _, fragment = target.partition("#")
                file = (path.parent / name).resolve() if name else path
                with self.subTest(path.name, target=target):
                    self.assertTrue(file.exists())
                    if fragment:
                        self.assertIn(fragment, self.anchors(file))
                checked += 1
        self.assertGreater(checked, 20)


class Paste(unittest.TestCase):
    """What OPERATING.md says to type, typed."""

    def test_values_of_the_chart_render(self):
        objects = chart.render(yaml.safe_load(block("Kubernetes", "# my-values.yaml")))
        self.assertEqual({"StatefulSet", "ServiceMonitor", "PrometheusRule"},
                         {"StatefulSet", "ServiceMonitor", "PrometheusRule"} & {o["kind"] for o in objects})
        certificate = yaml.safe_load(block("Kubernetes", "kind: Certificate"))
        pod = chart.of_kind(objects, "StatefulSet")[0]["metadata"]["name"] + "-0"
        service = chart.of_kind(objects, "Service")[0]["metadata"]["name"]
        self.assertIn(f"{pod}.{service}.training.svc", certificate["spec"]["dnsNames"])

    def test_scrape_configuration(self):
        text = block("Alerts", "scrape_configs:").replace("/usr/share/lmhead/prometheus", str(ROOT / "deploy/prometheus"))
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "prometheus.yml")
            path.write_text(text)
            result = subprocess.run(["promtool", "check", "config", path], capture_output=True, text=True)
        self.assertEqual(0, result.returncode, result.stdout + result.stderr)
        self.assertEqual("lmhead", yaml.safe_load(text)["scrape_configs"][0]["job_name"])

    def test_flags_of_the_unit_pass_its_parser(self):
        for text in (t for name, t in blocks(OPERATING.read_text()) if name == "systemd"):
            for line in re.findall(r"LMHEAD_FLAGS=([^'\n]*)", text):
                self.assertTrue(all(re.match(r"--\w+=\S+$", word) for word in line.split()), line)

    def test_certificates_tokens_and_policy(self):
        """Made as written, taken by a server, shown by a client that the policy knows."""
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="lmhead-docs-")))
        for word in ("ec_paramgen_curve", "openssl rand"):
            made = subprocess.run(["bash", "-euo", "pipefail", "-c", block("Security", word) + "\nprintf %s \"${token:-}\" > token"], cwd=folder,
                                  capture_output=True, text=True)
            self.assertEqual(0, made.returncode, made.stderr)
        (folder / "policy.json").write_text(block("Security", '"identities"'))
        flags = ["--tls_cert_file=tls.crt", "--tls_key_file=tls.key", "--tls_client_ca_file=ca.crt", "--auth_policy_file=policy.json",
                 "--auth_token_file=tokens.json", "--listen=127.0.0.1:0", "--backend=cpu"]
        doctor = subprocess.run([LMHEAD, "doctor", *flags], cwd=folder, capture_output=True, text=True)
        self.assertEqual(0, doctor.returncode, doctor.stdout)
        with serving(flags, folder) as address:
            port = address.rpartition(":")[2]
            for identity in (["--tls_cert_file=me.crt", "--tls_key_file=me.key"],
                             ["--tls_cert_file=me.crt", "--tls_key_file=me.key", "--token_file=token"]):
                for host in ("localhost", "127.0.0.1"):
                    status = subprocess.run([LMHEAD, "status", f"--address={host}:{port}", "--tls_ca_file=ca.crt", *identity], cwd=folder,
                                            capture_output=True, text=True)
                    self.assertEqual(0, status.returncode, status.stderr + (folder / "server.log").read_text())
            # Deny by default: an authority's certificate alone opens nothing.
            stranger = subprocess.run([LMHEAD, "status", f"--address=localhost:{port}", "--tls_ca_file=ca.crt", "--tls_cert_file=tls.crt",
                                       "--tls_key_file=tls.key"], cwd=folder, capture_output=True, text=True)
            self.assertEqual(1, stranger.returncode)
            self.assertIn("has role shard, wanted trunk or admin or monitor", stranger.stderr)


if __name__ == "__main__":
    unittest.main()
