"""The wheel: built, installed in a fresh environment, and used there; and what the library shows and leaves behind."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import torch

from service import Service

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARY = os.environ["LMHEAD_LIBRARY"]

USE = """
import sys, torch, lmhead
head = lmhead.RemoteHead.create(sys.argv[1], "wheel", vocab_size=11, hidden_size=4, init_std=0.1)
hidden = torch.randn(3, 4, requires_grad=True)
head.loss(hidden, torch.tensor([1, 2, -100])).backward()
print(lmhead.__file__, float(hidden.grad.abs().sum()) > 0)
"""


def clean_environment():
    """Without what would lead Python to the source tree."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "LMHEAD_LIBRARY")}


class WheelTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.service = Service()
        self.addCleanup(self.service.close)

    def run_checked(self, *command, **options):
        done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=120, **options)
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def test_the_wheel_works_in_a_fresh_environment(self):
        # A copy, since a build leaves files in its source folder.
        source = self.folder / "tree/client/python"
        shutil.copytree(ROOT / "client/python", source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
        shutil.copy(ROOT / "CMakeLists.txt", self.folder / "tree")
        wheels = self.folder / "wheels"
        self.run_checked(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w",
                         wheels, source, env={**clean_environment(), "LMHEAD_LIBRARY": LIBRARY})
        wheel, = wheels.iterdir()
        self.assertRegex(wheel.name, r"^lmhead-[0-9.]+-py3-none-linux_x86_64\.whl$")
        venv = self.folder / "venv"
        self.run_checked(sys.executable, "-m", "venv", "--system-site-packages", venv)
        # PyTorch of this environment, which may be a virtual one itself.
        site, = venv.glob("lib/*/site-packages")
        (site / "torch.pth").write_text(str(pathlib.Path(torch.__file__).parents[1]))
        self.run_checked(venv / "bin/python", "-m", "pip", "install", "--no-index", wheel, env=clean_environment())
        shown = self.run_checked(venv / "bin/python", "-c", USE, self.service.address, env=clean_environment(),
                                 cwd=self.folder)
        self.assertIn(str(venv), shown)
        self.assertIn("True", shown)
        self.check_carried(next(venv.glob("lib/*/site-packages/lmhead/lib")))

    def check_carried(self, folder):
        """Everything that is not the system's comes from the wheel, under names of its own, with its licence."""
        licences = {path.name for path in (folder / "licences").iterdir()}
        self.assertTrue(any(name.startswith("libgrpc++") for name in licences), licences)
        self.assertTrue(any(name.startswith("libssl") for name in licences), licences)
        for line in self.run_checked("ldd", folder / "liblmhead.so").splitlines():
            if "=>" in line and str(folder) not in line:
                self.assertRegex(line, r"lib(c|m|dl|rt|pthread|resolv|gcc_s|stdc\+\+)\.so")
            elif "=>" in line:
                self.assertIn("-lmhead-", line)

    def test_the_library_exports_the_c_interface_only(self):
        symbols = self.run_checked("nm", "-D", "--defined-only", LIBRARY).split("\n")
        names = {line.split()[-1] for line in symbols if line}
        self.assertEqual({name for name in names if not name.startswith("lmhead_")}, set())
        header = (ROOT / "client/c/lmhead.h").read_text()
        declared = set(re.findall(r"\b(lmhead_[a-z_]+)\(", header))
        self.assertEqual(names, declared - {"lmhead_status"})

    def test_a_process_ends_with_everything_still_open(self):
        script = """
import sys, torch, lmhead
head = lmhead.RemoteHead.create(sys.argv[1], "open", vocab_size=11, hidden_size=4, init_std=0.1, optimizer=lmhead.SGD())
step = head.step(1).__enter__()
futures = [step.loss_async(torch.randn(2000, 4, requires_grad=True), torch.zeros(2000, dtype=torch.int64)) for _ in range(9)]
"""
        self.run_checked(sys.executable, "-c", script, self.service.address)

    def test_an_import_without_a_library_says_what_to_do(self):
        environment = {**os.environ, "LMHEAD_LIBRARY": "/no/such/liblmhead.so"}
        done = subprocess.run([sys.executable, "-c", "import lmhead"], env=environment, capture_output=True, text=True)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("/no/such/liblmhead.so", done.stderr)


if __name__ == "__main__":
    unittest.main()
