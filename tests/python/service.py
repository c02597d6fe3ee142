"""A real `lmhead serve` for the tests, in a process of its own, which ends with the tests' process however that ends."""

import concurrent.futures
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

BINARY = os.environ["LMHEAD_BINARY"]

# Becomes the program of its arguments, which the kernel kills (prctl's PR_SET_PDEATHSIG) when the thread that started it ends.
END_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
_starter = concurrent.futures.ThreadPoolExecutor(1)  # One thread that lives as long as the process, whoever calls start().


class Service:
    """Serves on a Unix socket, whose address a restarted process keeps."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="lmhead")
        self.address = f"unix:{self._folder.name}/socket"
        self._process = None
        self.start()

    def start(self):
        folder = pathlib.Path(self._folder.name)
        ready = folder / "ready"
        ready.unlink(missing_ok=True)
        (folder / "socket").unlink(missing_ok=True)
        with open(folder / "log", "ab") as log:
            self._process = _starter.submit(
                subprocess.Popen,
                [sys.executable, "-c", END_WITH_PARENT, str(os.getpid()), BINARY, "serve", f"--listen={self.address}", "--metrics_listen=127.0.0.1:0", f"--ready_file={ready}",
                 "--backend=cpu", "--memory_limit_bytes=2000000000", f"--checkpoint_dir={folder}/checkpoints"],
                stdout=log, stderr=log, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}).result()
        deadline = time.monotonic() + 30
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "log").read_text())
            time.sleep(0.02)
        json.loads(ready.read_text())

    def pause(self):
        """It hangs from here on, until go_on()."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # Until then it answers still.

    def go_on(self):
        self._process.send_signal(signal.SIGCONT)

    def kill(self):
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self):
        self.kill()
        self._folder.cleanup()
