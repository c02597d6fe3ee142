"""The README's Python, pasted line by line, as a new user would."""

import code
import contextlib
import io
import pathlib
import re
import unittest

from base import ServiceTest

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"


class ManualTest(ServiceTest):
    def test_the_readmes_lines_train_a_model(self):
        block, = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
        self.assertIn("127.0.0.1:50051", block)
        console = code.InteractiveConsole()
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            for line in block.replace("127.0.0.1:50051", self.service.address).split("\n"):
                console.push(line)
        losses = [float(loss) for _, loss in re.findall(r"^(\d+) ([\d.]+)$", shown.getvalue(), re.MULTILINE)]
        self.assertEqual(len(losses), 20, shown.getvalue())
        self.assertLess(losses[-1], losses[0])
        self.assertNotIn("Error", shown.getvalue())


if __name__ == "__main__":
    unittest.main()
