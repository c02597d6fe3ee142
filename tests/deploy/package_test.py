"""What `cmake --install` and the Debian packages hold, made from the build that is tested; the server of the package serves.

That apt installs them on a bare system and takes them away again is shown by deb_root.py, which takes minutes."""

import gzip
import json
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

import chart
from stack import serving

BUILD = pathlib.Path(os.environ.get("LMHEAD_BUILD", chart.ROOT / "build"))
DEBIAN = chart.ROOT / "deploy/debian"


def run(*command, **options):
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    if result.returncode != 0:
        raise RuntimeError(f"{command}: status {result.returncode}: {result.stdout}{result.stderr}")
    return result.stdout


def files_of(root):
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir() or path.is_symlink()}


def version():
    return re.search(r"project\(lmhead VERSION ([0-9.]+)", (chart.ROOT / "CMakeLists.txt").read_text())[1]


SERVER = {"bin/lmhead", "bin/lmhead-bench", "share/lmhead/grafana/lmhead.json", "share/lmhead/prometheus/rules.yaml",
          "share/lmhead/systemd/lmhead.service", "share/lmhead/proto/lmhead/v1/loss.proto", "share/doc/lmhead/README.md",
          "share/doc/lmhead/docs/OPERATING.md", "share/man/man1/lmhead.1.gz", "share/man/man1/lmhead-bench.1.gz",
          "share/lmhead/licenses/nlohmann-json3-dev", "share/lmhead/licenses/libspdlog-dev", "share/lmhead/licenses/libfmt-dev"}
HEADER = "include/lmhead/lmhead.h"
LIBRARY = ("liblmhead.so.0", f"liblmhead.so.{version()}")
DEVELOPMENT = ("liblmhead.so", "pkgconfig/lmhead.pc")
PACKAGES = {"lmhead", "liblmhead0", "liblmhead-dev"}

C_PROGRAM = r"""
#include <lmhead/lmhead.h>
#include <stdio.h>
int main(void) {
  return puts(lmhead_version()) < 0;
}
"""


class CProgram:
    """Built and run with the C interface below a prefix, found by pkg-config."""

    def assert_c_program_works(self, prefix, libdir):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="lmhead-c-")))
        source, program = folder / "version.c", folder / "version"
        source.write_text(C_PROGRAM)
        flags = run("pkg-config", "--cflags", "--libs", "lmhead",
                    env=dict(os.environ, PKG_CONFIG_PATH=str(prefix / libdir / "pkgconfig"), PKG_CONFIG_ALLOW_SYSTEM_LIBS="1",
                             PKG_CONFIG_ALLOW_SYSTEM_CFLAGS="1")).split()
        run("cc", "-Wall", "-Werror", source, "-o", program, *flags)
        self.assertIn("liblmhead.so.0", run("objdump", "-p", program))
        self.assertEqual(version(), run(program, env={"LD_LIBRARY_PATH": str(prefix / libdir)}).strip())


class Install(CProgram, unittest.TestCase):
    def test_layout(self):
        with tempfile.TemporaryDirectory() as folder:
            run("cmake", "--install", BUILD, "--prefix", folder)
            found = files_of(pathlib.Path(folder))
            self.assertLessEqual(SERVER | {HEADER} | {f"lib/{name}" for name in LIBRARY + DEVELOPMENT}, found)
            top = {name.split("/")[0] for name in found}
            self.assertEqual({"bin", "include", "lib", "share"}, top)
            # What only a package may do: nothing outside the prefix, and no unit of systemd.
            self.assertFalse([name for name in found if name.startswith(("lib/systemd", "lib/sysusers.d", "share/lintian"))])
            self.assert_c_program_works(pathlib.Path(folder), "lib")
            self.assertEqual(f"lmhead {version()}\n", run(pathlib.Path(folder, "bin/lmhead"), "--version"))


class Packages(CProgram, unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="lmhead-packages-")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        run("cpack", "--config", BUILD / "CPackConfig.cmake", "-B", cls.folder / "made", cwd=cls.folder)
        cls.debs = {path.name.split("_")[0]: path for path in (cls.folder / "made").glob("*.deb")}
        for name, deb in cls.debs.items():
            run("dpkg-deb", "-x", deb, cls.folder / name)
            run("dpkg-deb", "-e", deb, cls.folder / f"{name}.control")
        cls.libdir = "lib/" + run("dpkg-architecture", "-qDEB_HOST_MULTIARCH").strip()

    def field(self, package, name):
        return run("dpkg-deb", "-f", self.debs[package], name).strip()

    def test_packages_of_this_version(self):
        self.assertEqual(PACKAGES, set(self.debs))
        for package in self.debs:
            self.assertEqual(package, self.field(package, "Package"))
            self.assertEqual(version(), self.field(package, "Version"))
            self.assertEqual(run("dpkg", "--print-architecture").strip(), self.field(package, "Architecture"))

    def test_contents(self):
        found = files_of(self.folder / "lmhead")
        wanted = {f"usr/{name}" for name in SERVER} | {
            "etc/default/lmhead", "usr/lib/systemd/system/lmhead.service", "usr/lib/sysusers.d/lmhead.conf",
            "usr/share/doc/lmhead/copyright", "usr/share/doc/lmhead/changelog.gz"}
        self.assertLessEqual(wanted, found)
        self.assertFalse([name for name in found if re.search(r"\.so|include/", name)])
        for package, files in {"liblmhead0": {f"{self.libdir}/{name}" for name in LIBRARY},
                               "liblmhead-dev": {HEADER} | {f"{self.libdir}/{name}" for name in DEVELOPMENT}}.items():
            documents = {f"share/doc/{package}/copyright", f"share/doc/{package}/changelog.gz", f"share/lintian/overrides/{package}"}
            self.assertEqual({f"usr/{name}" for name in files | documents}, files_of(self.folder / package))

    def test_lintian(self):
        """What is left by decision is overridden with its reason in deploy/debian."""
        root = ["--allow-root"] if os.geteuid() == 0 else []
        for deb in self.debs.values():
            run("lintian", *root, "--fail-on", "error,warning", deb)

    def test_manuals_name_every_command(self):
        for program, pattern in (("lmhead", r"^  (\w+)  "), ("lmhead-bench", r"^  (\w+) (?: |DIR)")):
            page = gzip.decompress((self.folder / f"lmhead/usr/share/man/man1/{program}.1.gz").read_bytes()).decode()
            commands = re.findall(pattern, run(self.folder / "lmhead/usr/bin" / program, "--help").partition("--")[0], re.M)
            self.assertGreaterEqual(len(commands), 3)
            self.assertEqual(set(commands), set(re.findall(r"^\.TP\n\.B ([a-z]+)$", page, re.M)))

    def test_owners_and_modes(self):
        for package, deb in self.debs.items():
            for line in run("dpkg-deb", "-c", deb).splitlines():
                mode, owner = line.split()[:2]
                self.assertEqual("root/root", owner, line)
                self.assertNotRegex(mode, r"^[^l].......w.", line)
                self.assertNotRegex(mode, r"[sS]", line)

    def test_dependencies_are_those_of_the_loader(self):
        for package in ("lmhead", "liblmhead0"):
            depends = self.field(package, "Depends")
            self.assertRegex(depends, r"\blibgrpc\+\+1\S*")
            self.assertRegex(depends, r"\blibc6 \(>= ")
        self.assertRegex(self.field("lmhead", "Depends"), r"\blibdnnl")
        self.assertNotRegex(self.field("liblmhead0", "Depends"), r"\blibdnnl")
        self.assertEqual(f"liblmhead0 (= {version()})", self.field("liblmhead-dev", "Depends"))

    def test_the_loader_and_other_packages_learn_of_the_library(self):
        control = self.folder / "liblmhead0.control"
        self.assertEqual("activate-noawait ldconfig\n", (control / "triggers").read_text())
        self.assertEqual(f"liblmhead 0 liblmhead0 (>= {version()})", (control / "shlibs").read_text().strip())

    def test_nothing_that_the_loader_would_miss(self):
        for file in ("lmhead/usr/bin/lmhead", "lmhead/usr/bin/lmhead-bench", f"liblmhead0/usr/{self.libdir}/liblmhead.so.{version()}"):
            self.assertNotIn("not found", run("ldd", self.folder / file))
            self.assertNotRegex(run("objdump", "-p", self.folder / file), r"R(UN)?PATH")

    def test_the_environment_file_is_the_administrator_s(self):
        self.assertEqual("/etc/default/lmhead\n", (self.folder / "lmhead.control/conffiles").read_text())
        # What stands there is a comment: a package that is installed serves as its unit says.
        lines = [line for line in (DEBIAN / "lmhead.default").read_text().splitlines() if not line.startswith("#")]
        self.assertEqual(["LMHEAD_FLAGS="], lines)
        unit = (self.folder / "lmhead/usr/lib/systemd/system/lmhead.service").read_text()
        self.assertIn("EnvironmentFile=-/etc/default/lmhead", unit)
        self.assertIn("ExecStart=/usr/bin/lmhead serve", unit)

    def test_flags_of_the_examples_exist(self):
        known = set(re.findall(r"^  --(\w+)  \(default: ", run(self.folder / "lmhead/usr/bin/lmhead", "serve", "--help"), re.M))
        flags = re.findall(r"--(\w+)=", (DEBIAN / "lmhead.default").read_text())
        self.assertGreater(len(flags), 3)
        self.assertLessEqual(set(flags), known)

    def test_the_user_of_the_unit_is_made(self):
        root = self.folder / "root"
        (root / "etc").mkdir(parents=True)
        (root / "usr/lib").mkdir(parents=True)
        run("systemd-sysusers", f"--root={root}", self.folder / "lmhead/usr/lib/sysusers.d/lmhead.conf")
        self.assertRegex((root / "etc/passwd").read_text(), r"(?m)^lmhead:x:\d+:\d+:lmhead service:/var/lib/lmhead:/usr/sbin/nologin$")
        self.assertRegex((self.folder / "lmhead/usr/lib/systemd/system/lmhead.service").read_text(), r"(?m)^User=lmhead$")

    def test_scripts_of_the_package_are_the_ones_that_are_checked(self):
        for name in ("postinst", "prerm", "postrm"):
            packed = self.folder / "lmhead.control" / name
            self.assertEqual((DEBIAN / name).read_text(), packed.read_text())
            self.assertEqual(0o755, packed.stat().st_mode & 0o777)
            run("sh", "-n", packed)

    def test_a_c_program_is_built_with_the_library(self):
        both = self.folder / "both"
        for package in ("liblmhead0", "liblmhead-dev"):
            run("dpkg-deb", "-x", self.debs[package], both)
        self.assert_c_program_works(both / "usr", self.libdir)

    def test_it_serves(self):
        lmhead = self.folder / "lmhead/usr/bin/lmhead"
        flags = ["--listen=127.0.0.1:0", "--backend=cpu", f"--checkpoint_dir={self.folder / 'state'}", "--restore=true"]
        with serving(flags, self.folder, lmhead) as address:
            status = json.loads(run(lmhead, "status", f"--address={address}", "--json"))
            self.assertEqual(version(), status["server"]["version"] if "server" in status else status["version"])


if __name__ == "__main__":
    unittest.main()
