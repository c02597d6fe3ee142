"""Every rule of check_includes.py, shown to fail and to pass."""

import pathlib
import tempfile
import unittest

import check_includes

RULES = """
base/              ->
mid/seam.h         -> base/
mid/               -> base/ mid/seam.h !cuda
top/               -> base/ mid/seam.h !grpcpp/   # comment
tests/             -> *
"""


class CheckIncludes(unittest.TestCase):
    def check(self, files, rules=RULES):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            return check_includes.check(rules, root)

    def test_allowed(self):
        self.assertEqual([], self.check({
            "top/a.cc": '#include "top/a.h"\n#include "mid/seam.h"\n#include <grpcpp/grpcpp.h>\n#include <vector>\n',
            "mid/b.cc": '#include "mid/seam.h"\n#include <cuda_runtime.h>\n#include "absl/status/status.h"\n',
            "tests/t.cc": '#include "mid/b.h"\n#include <grpcpp/grpcpp.h>\n',
        }))

    def test_layer_above(self):
        self.assertEqual(["base/a.h:2: error: base/ may not include top/a.h"],
                         self.check({"base/a.h": '\n#include "top/a.h"\n'}))

    def test_a_folder_is_wider_than_its_seam(self):
        self.assertEqual(["top/a.cc:1: error: top/ may not include mid/b.h"],
                         self.check({"top/a.cc": '#include "mid/b.h"\n'}))

    def test_the_seam_has_its_own_rule(self):
        self.assertEqual(["mid/seam.h:1: error: mid/seam.h may not include mid/b.h",
                          "mid/seam.h:2: error: mid/seam.h may not include cuda.h"],
                         self.check({"mid/seam.h": '#include "mid/b.h"\n#include <cuda.h>\n'}))

    def test_third_party_in_quotes_and_angles(self):
        self.assertEqual(["base/a.h:1: error: base/ may not include grpcpp/grpcpp.h",
                          "base/a.h:2: error: base/ may not include grpcpp/grpcpp.h"],
                         self.check({"base/a.h": '#include "grpcpp/grpcpp.h"\n#  include <grpcpp/grpcpp.h>\n'}))

    def test_nobody_includes_tests(self):
        self.assertEqual(["top/a.cc:1: error: top/ may not include tests/t.h"],
                         self.check({"top/a.cc": '#include "tests/t.h"\n'}))

    def test_sibling_by_short_name(self):
        self.assertEqual(["base/a.cc:1: error: include a.h by its path from the root"],
                         self.check({"base/a.cc": '#include "a.h"\n', "base/a.h": ""}))

    def test_unowned_file(self):
        self.assertEqual(["new/a.cc:1: error: no layer owns this file; add its folder to the rules"],
                         self.check({"new/a.cc": ""}))

    def test_build_folders_are_not_read(self):
        self.assertEqual([], self.check({"build/proto/a.cc": "", ".cache/a.cc": ""}))

    def test_rules(self):
        self.assertEqual(["rules: a circle: a/ -> b/ -> a/"], self.check({}, "a/ -> b/\nb/ -> a/\n"))
        self.assertEqual(["rules: a/ may see b/, which is not a layer"], self.check({}, "a/ -> b/\n"))


if __name__ == "__main__":
    unittest.main()
