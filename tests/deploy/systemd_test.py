"""The unit: systemd understands it, and finds it confined."""

import pathlib
import re
import subprocess
import tempfile
import unittest

import chart

UNIT = chart.ROOT / "deploy/systemd/lmhead.service"
# Of systemd's scale of 0 to 10, in tenths; below 2 it says OK.
MOST_EXPOSURE = 20


class Unit(unittest.TestCase):
    def analyze(self, *arguments):
        with tempfile.TemporaryDirectory() as folder:
            # The program need not be installed here.
            unit = pathlib.Path(folder, UNIT.name)
            unit.write_text(UNIT.read_text().replace("/usr/bin/lmhead", "/bin/true"))
            result = subprocess.run(["systemd-analyze", *arguments, unit], capture_output=True, text=True)
        self.assertEqual(0, result.returncode, result.stdout + result.stderr)
        return result.stdout + result.stderr

    def test_verify(self):
        # Only of this file: other units of the machine are not ours.
        complaints = [line for line in self.analyze("verify", "--recursive-errors=no").splitlines() if UNIT.name in line]
        self.assertEqual([], complaints)

    def test_exposure(self):
        self.analyze("security", "--offline=true", f"--threshold={MOST_EXPOSURE}")

    def test_the_stop_waits_for_the_drain(self):
        text = UNIT.read_text()
        drain = int(re.search(r"--(?:shutdown|drain)_timeout_seconds=(\d+)", text)[1])
        self.assertLessEqual(drain + 15, int(re.search(r"^TimeoutStopSec=(\d+)$", text, re.M)[1]))


if __name__ == "__main__":
    unittest.main()
