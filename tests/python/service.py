"""A real `lmhead serve` for the tests, in a process of its own."""

import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time

BINARY = os.environ["LMHEAD_BINARY"]


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
            self._process = subprocess.Popen(
                [BINARY, "serve", f"--listen={self.address}", "--metrics_listen=127.0.0.1:0", f"--ready_file={ready}",
                 "--backend=cpu", "--memory_limit_bytes=2000000000", f"--checkpoint_dir={folder}/checkpoints"],
                stdout=log, stderr=log, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
        deadline = time.monotonic() + 30
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "log").read_text())
            time.sleep(0.02)
        json.loads(ready.read_text())

    def kill(self):
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self):
        self.kill()
        self._folder.cleanup()
