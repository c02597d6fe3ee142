"""The images' recipes, by a linter and by our own rules. That their steps work is shown by docker_stages.py, which takes minutes."""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import yaml

import chart
from docker_stages import instructions

DOCKER = chart.ROOT / "docker"
TOOLS = pathlib.Path(sys.executable).parent
DOCKERFILES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.cpu"]
COMPOSE = DOCKER / "compose.yaml"


def stages(path):
    """The instructions of each stage: [[(word, arguments)]]."""
    result = []
    for word, arguments in instructions(path.read_text()):
        if word == "FROM":
            result.append([])
        result[-1].append((word, arguments))
    return result


def argument(stage, word):
    """Of the last such instruction, which is the one that counts."""
    return next(arguments for w, arguments in reversed(stage) if w == word)


class Dockerfiles(unittest.TestCase):
    def tool(self, name, *arguments):
        result = subprocess.run([TOOLS / name, *map(str, arguments)], capture_output=True, text=True)
        self.assertEqual(0, result.returncode, result.stdout + result.stderr)

    def test_hadolint(self):
        for path in DOCKERFILES:
            # DL3008 wants versions of Debian packages, which vanish from the mirrors with each update.
            self.tool("hadolint", "--ignore", "DL3008", path)

    def test_bases_are_pinned(self):
        for path in DOCKERFILES:
            for stage in stages(path):
                image = stage[0][1].split()[0]
                self.assertRegex(image, r":[0-9]+\.[0-9]+[\w.-]*$", path.name)

    def test_the_last_stage_runs_as_nobody_and_says_how_it_is(self):
        for path in DOCKERFILES:
            last = stages(path)[-1]
            with self.subTest(path.name):
                self.assertEqual("65532:65532", argument(last, "USER"))
                self.assertIn('CMD ["lmhead", ', argument(last, "HEALTHCHECK"))
                self.assertEqual('["lmhead"]', argument(last, "ENTRYPOINT"))
                self.assertFalse([a for w, a in last if w == "RUN" and re.search(r"apt|pip|curl|wget", a)])

    def test_the_user_is_the_chart_s(self):
        pod = chart.of_kind(chart.rendered(chart.VALUE_SETS[0]), "StatefulSet")[0]["spec"]["template"]["spec"]
        self.assertEqual("{runAsUser}:{runAsGroup}".format(**pod["securityContext"]), argument(stages(DOCKERFILES[0])[-1], "USER"))

    def test_licences_come_along(self):
        for path in DOCKERFILES:
            self.assertIn("collect_licenses.sh build/portable /opt/lmhead/licenses", path.read_text())

    def test_secrets_and_history_stay_out_of_the_context(self):
        self.assertIn(".git", (chart.ROOT / ".dockerignore").read_text().splitlines())


class Licences(unittest.TestCase):
    CUDA = {"cuda-cudart-13-0": "cudart", "libcublas-13-0": "cublas", "libnccl2": "nccl"}

    def collect(self, packages):
        """Of a build that links and carries zlib, with CUDA of a system that has these packages: the process, and the files made."""
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="lmhead-licences-")))
        (folder / "build/bin/lib").mkdir(parents=True)
        (folder / "build/bin/lib/libz.so.1").touch()
        archive = subprocess.run(["dpkg", "-L", "zlib1g-dev"], check=True, capture_output=True, text=True)
        (folder / "build/archives.ld").write_text(re.search(r"\S*/libz\.a$", archive.stdout, re.M)[0] + "\n")
        (folder / "doc").mkdir()
        for package in packages:
            (folder / "doc" / package).mkdir()
            (folder / "doc" / package / "copyright").write_text("as is\n")
        result = subprocess.run([DOCKER / "collect_licenses.sh", folder / "build", folder / "made", folder / "doc"], capture_output=True, text=True)
        return result, {path.name for path in (folder / "made").glob("*")}

    def test_of_all_that_is_linked_or_carried(self):
        result, made = self.collect(self.CUDA)
        self.assertEqual(0, result.returncode, result.stderr)
        self.assertLessEqual({*self.CUDA.values(), "zlib1g", "zlib1g-dev"}, made)

    def test_one_that_is_missing_ends_the_build(self):
        for package, name in self.CUDA.items():
            result, _ = self.collect(set(self.CUDA) - {package})
            self.assertEqual(1, result.returncode, package)
            self.assertIn(f"no copyright file of {name}", result.stderr)


class Compose(unittest.TestCase):
    def setUp(self):
        self.compose = yaml.safe_load(COMPOSE.read_text())
        self.services = self.compose["services"]

    def test_schema(self):
        result = subprocess.run([TOOLS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE], capture_output=True,
                                text=True)
        self.assertEqual(0, result.returncode, result.stdout + result.stderr)

    def test_services_are_there_and_confined(self):
        self.assertEqual({"lmhead", "demo", "prometheus", "grafana"}, set(self.services))
        for name, service in self.services.items():
            with self.subTest(name):
                self.assertIs(True, service["read_only"])
                self.assertEqual(["ALL"], service["cap_drop"])
                self.assertIn("mem_limit", service)
                self.assertRegex(service["image"], r":v?[0-9]+\.[0-9]+\.[0-9]+[\w.-]*$")
                for port in service.get("ports", []):
                    self.assertTrue(port.startswith("127.0.0.1:"), port)

    def test_files_that_are_mounted_exist(self):
        named = set(self.compose["volumes"])
        for service in self.services.values():
            for volume in service.get("volumes", []):
                source = volume.split(":")[0]
                self.assertTrue(source in named or (DOCKER / source).exists(), source)

    def test_prometheus_scrapes_the_service(self):
        config = yaml.safe_load((DOCKER / "compose/prometheus.yaml").read_text())
        target = config["scrape_configs"][0]["static_configs"][0]["targets"][0]
        host, port = target.split(":")
        self.assertTrue(any(a.startswith("--metrics_listen=") and a.endswith(":" + port) for a in self.services[host]["command"]))
        self.assertEqual("lmhead", config["scrape_configs"][0]["job_name"])

    def test_the_image_is_the_project_s_version(self):
        version = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())["appVersion"]
        self.assertEqual(f"lmhead:{version}-cpu", self.services["lmhead"]["image"])


if __name__ == "__main__":
    unittest.main()
