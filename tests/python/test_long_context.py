"""The comparison of a local head with a remote one, at a size that runs here."""

import copy
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BENCH = ROOT / "client/python/bench"
sys.path.insert(0, str(BENCH))
from long_context import judge  # noqa: E402


class LongContextTest(unittest.TestCase):
    def test_it_measures_and_its_verdicts_can_fail(self):
        with tempfile.TemporaryDirectory() as folder:
            run = subprocess.run(
                [sys.executable, BENCH / "long_context.py", "--server", os.environ["LMHEAD_BINARY"], "--out", folder,
                 "--contexts=512", "--steps=4", "--layers=1", "--width=32", "--heads=2", "--vocab_size=16384",
                 "--byte_pairs=300", "--device=cpu", "--text", ROOT / "docs/NUMERICS.md"],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            self.assertEqual(run.returncode, 0, run.stdout)
            result = json.loads((pathlib.Path(folder) / "result.json").read_text())
        measured = result["runs"][0]
        self.assertEqual([len(measured[where]["losses"]) for where in ("local", "remote")], [4, 4])
        self.assertLess(measured["remote"]["losses"][-1], measured["remote"]["losses"][0])
        self.assertGreater(measured["remote"]["service"]["peak_bytes"], 4 * 16384 * 32)
        self.assertTrue(all(holds for holds, _ in judge(result)))

        drifted = copy.deepcopy(result)
        drifted["runs"][0]["remote"]["losses"][2] *= 1.001
        self.assertEqual([holds for holds, _ in judge(drifted)], [False, True])
        heavy = copy.deepcopy(result)
        heavy["runs"][0]["remote"]["peak_bytes"] = measured["local"]["peak_bytes"] - measured["logits_bytes"] + 1
        self.assertEqual([holds for holds, _ in judge(heavy)], [True, False])
        full = copy.deepcopy(result)
        full["runs"][0]["local"] = {"out_of_memory": "", "losses": []}
        self.assertEqual([holds for holds, _ in judge(full)], [True, False])


if __name__ == "__main__":
    unittest.main()
