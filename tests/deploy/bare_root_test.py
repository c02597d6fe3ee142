"""The packages of the tested build, on a bare Debian 12 by chroot: apt installs them, they serve, and a purge takes them away again.

Skipped, with the reason, where that cannot be tried: without root, mounts, debootstrap or its network."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

import chart
from deb_root import Mounts, check, fetch, make_root, packages_of
from docker_stages import own_mounts, remove

BUILD = pathlib.Path(os.environ.get("LMHEAD_BUILD", chart.ROOT / "build"))


class BareRoot(unittest.TestCase):
    def setUp(self):
        if os.geteuid() != 0 or shutil.which("debootstrap") is None:
            self.skipTest("needs root and debootstrap")
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="lmhead-bare-"))
        self.addCleanup(remove, self.folder)
        try:
            own_mounts()
            self.root = make_root(self.folder / "root", base=None)
        except (OSError, subprocess.SubprocessError) as error:
            self.skipTest(f"no bare system can be made here: {error}")

    def test_packages(self):
        subprocess.run(["cpack", "--config", BUILD / "CPackConfig.cmake", "-B", self.folder / "made"], check=True, cwd=self.folder,
                       stdout=subprocess.DEVNULL)
        packages = packages_of(self.folder / "made")
        with Mounts(self.root.folder):
            try:
                fetch(self.root, packages)
            except SystemExit as error:
                if "Unable to fetch" not in str(error) and "Failed to fetch" not in str(error):
                    raise
                self.skipTest(f"no packages from the network: {error}")
            check(self.root, packages)


if __name__ == "__main__":
    unittest.main(verbosity=2)
