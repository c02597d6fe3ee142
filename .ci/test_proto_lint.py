"""Every rule of proto_lint.py, shown to fail and to pass, through the real protoc."""

import pathlib
import subprocess
import tempfile
import unittest

from google.protobuf import descriptor_pb2

import proto_lint

GOOD = """syntax = "proto3";
package lmhead.v1;
// A kind.
enum OptimizerKind {
  // None.
  OPTIMIZER_KIND_UNSPECIFIED = 0;
  // One.
  OPTIMIZER_KIND_ADAMW = 1;
}
// Asks.
message GetRequest {
  // Name.
  string head_name = 1;
  // Kinds by name.
  map<string, OptimizerKind> kinds = 2;
  // Bulk, second.
  bytes more_rows = 99;
  // Bulk.
  bytes rows = 100;
}
// Answers.
message GetResponse {}
// Serves.
service HeadService {
  // Gets.
  rpc Get(GetRequest) returns (stream GetResponse);
}
"""


class ProtoLint(unittest.TestCase):
    def lint(self, text, name="lmhead/v1/a.proto"):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, name)
            path.parent.mkdir(parents=True)
            path.write_text(text)
            out = pathlib.Path(folder, "set")
            subprocess.run(["protoc", f"--proto_path={folder}", "--include_source_info",
                            f"--descriptor_set_out={out}", name], check=True)
            descriptor_set = descriptor_pb2.FileDescriptorSet()
            descriptor_set.ParseFromString(out.read_bytes())
            return proto_lint.check(descriptor_set)

    def test_good(self):
        self.assertEqual([], self.lint(GOOD))

    def test_each_rule(self):
        for old, new, wanted in (
            ("package lmhead.v1;", "package lmhead.v2;", "the folder says lmhead.v1"),
            ("OPTIMIZER_KIND_ADAMW", "ADAMW", "does not start with OPTIMIZER_KIND_"),
            ("OPTIMIZER_KIND_UNSPECIFIED", "OPTIMIZER_KIND_NONE", "use OPTIMIZER_KIND_UNSPECIFIED"),
            ("head_name", "headName", "is not snake_case"),
            ("message GetResponse {}", "message GetResponse { // Inner.\nmessage inner {} }", "is not CamelCase"),
            ("returns (stream GetResponse)", "returns (GetRequest)", "use .lmhead.v1.GetResponse"),
            ("rpc Get(GetRequest)", "rpc Get(GetResponse)", "use .lmhead.v1.GetRequest"),
            ("rows = 100;", "rows = 1;\n  // Count.\n  int64 count = 101;", "use one above 101"),
            ("  // Name.\n", "", "field GetRequest.head_name has no comment"),
            ("  // One.\n", "", "value OPTIMIZER_KIND_ADAMW has no comment"),
            ("// A kind.\n", "", "enum OptimizerKind has no comment"),
            ("// Asks.\n", "", "message GetRequest has no comment"),
            ("  // Gets.\n", "", "rpc Get has no comment"),
            ("// Serves.\n", "", "service HeadService has no comment"),
        ):
            with self.subTest(wanted):
                self.assertIn(old, GOOD)
                text = GOOD.replace(old, new)
                if old == "rows = 100;":
                    text = text.replace("head_name = 1", "head_name = 7")
                self.assertTrue(any(wanted in error for error in self.lint(text)), self.lint(text))

    def test_a_line_is_named(self):
        self.assertEqual(["lmhead/v1/a.proto:11: error: message get_request is not CamelCase"],
                         [e for e in self.lint(GOOD.replace("message GetRequest", "message get_request")
                                               .replace("Get(GetRequest", "Get(get_request")) if "message" in e])


if __name__ == "__main__":
    unittest.main()
