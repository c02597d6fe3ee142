#!/usr/bin/env python3
"""Runs the tests of the Python package with the system's PyTorch.

Usage: run.py [--as-is] ENVIRONMENT [TEST…]     ENVIRONMENT: folder for a virtual environment with transformers; made when missing.

--as-is takes the environment with the versions that it has, such as a newer PyTorch, or TRL. LMHEAD_BINARY and
LMHEAD_LIBRARY name what is tested. Exits with 77 (skipped) without PyTorch.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# What goes with PyTorch 1.13 to 2.2, and the versions of their time.
PACKAGES = ["transformers==4.36.2", "accelerate==0.25.0", "huggingface_hub==0.19.4", "safetensors==0.4.5"]
SKIPPED = 77


def make_environment(folder):
    """A virtual environment over the system's packages; complete once its mark is there."""
    mark = folder / "complete"
    if mark.exists() and mark.read_text() == repr(PACKAGES):
        return
    print(f"tests of the Python package: installing {', '.join(PACKAGES)} to {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", folder], check=True)
    try:
        subprocess.run([folder / "bin/python", "-m", "pip", "install", "-q", *PACKAGES], check=True)
    except subprocess.CalledProcessError:
        raise SystemExit("tests of the Python package: pip could not install them (no network?); install them by other "
                         "means, or run `ctest -LE python`")
    mark.write_text(repr(PACKAGES))


def main(*words):
    as_is = words[0] == "--as-is"
    folder, *tests = words[as_is:]
    folder = pathlib.Path(folder).resolve()
    if not as_is and importlib.util.find_spec("torch") is None:
        print(f"skipped: {sys.executable} has no PyTorch; install python3-torch")
        return SKIPPED
    if not as_is:
        make_environment(folder)
    path = os.pathsep.join([str(ROOT / "client/python"), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_WAIT_POLICY": "PASSIVE",
                   "TRANSFORMERS_OFFLINE": "1"}
    chosen = tests or ["discover", "-s", str(HERE)]
    os.chdir(HERE)
    sys.stdout.flush()
    # In this process's place, so that who ends it ends the tests.
    os.execve(folder / "bin/python", [str(folder / "bin/python"), "-m", "unittest", *chosen], environment)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
