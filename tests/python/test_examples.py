"""The examples run, for a few steps each."""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from base import ServiceTest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "client/python/examples"


class ExamplesTest(ServiceTest):
    def run_example(self, name, *options):
        """The values it shows, one a step."""
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([sys.executable, EXAMPLES / name, f"--address={self.service.address}", *options], cwd=folder,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual(self.client.call("ListHeads").get("heads", []), [])  # It has tidied up.
        return [float(value) for value in re.findall(r"step +\d+ of \d+ .*? ([\d.]+)  ", done.stdout)]

    def test_training(self):
        losses = self.run_example("train_gpt.py", "--steps=4")
        self.assertEqual(len(losses), 4)
        self.assertLess(losses[-1], losses[0])

    def test_fine_tuning(self):
        losses = self.run_example("finetune.py", "--steps=4")
        self.assertEqual(len(losses), 4)
        self.assertLess(losses[-1], losses[0])

    def test_distillation(self):
        values = self.run_example("distil.py", "--steps=3")
        self.assertEqual(len(values), 6)
        self.assertLess(values[-1], values[3])

    def test_policy(self):
        self.assertEqual(len(self.run_example("grpo.py", "--steps=2")), 2)


if __name__ == "__main__":
    unittest.main()
