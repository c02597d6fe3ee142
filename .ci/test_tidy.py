"""Every rule of tidy.py, shown to fail and to pass."""

import unittest

import tidy

GUARDED = "#ifndef LMHEAD_A_B_H_\n#define LMHEAD_A_B_H_\n#endif  // LMHEAD_A_B_H_\n"


def errors(file, text):
    return [error.split(": error: ") for error in tidy.check({file: text})]


def function(lines, indent=""):
    return f"{indent}int F() {{\n" + f"{indent}  ++a;\n" * (lines - 2) + indent + "}\n"


class Bans(unittest.TestCase):
    def assertBanned(self, text, word, file="server/head/a.cc"):
        found = errors(file, f"\n{text}\n")
        self.assertEqual(1, len(found), found)
        self.assertEqual(f"{file}:2", found[0][0])
        self.assertIn(word, found[0][1])

    def test_each_ban(self):
        for text, word in (
            ("cudaMalloc(&p, 1);", "use DeviceArena"),
            ("cudaMallocAsync(&p, 1, s);", "use DeviceArena"),
            ("std::mutex m;", "use absl::Mutex"),
            ("std::condition_variable_any c;", "use absl::Mutex"),
            ("std::lock_guard l(m);", "use absl::MutexLock"),
            ("std::thread(f).detach();", "use join()"),
            ("using namespace std;", "one by one"),
            ("sprintf(b, f);", "use absl::StrFormat"),
            ("TEST(A, DISABLED_B);", "GTEST_SKIP"),
            ("#if 0", "version history"),
            ("// FIXM" "E later", "issue tracker"),
            ("// TOD" "O(me): later", "issue tracker"),
            ('Open("/hom' 'e/someone/x");', "path of one machine"),
            ("x = 1; ", "blanks"),
            ("x = 1;\t", "blanks"),
        ):
            with self.subTest(text):
                self.assertBanned(text, word)
        self.assertBanned("see deb.debia" "n.org for it", "registry", "README.md")
        self.assertBanned("FROM nvc" "r.io/x", "registry", "docker/Dockerfile")
        self.assertBanned("file(GLOB s *.cc)", "list of names", "x/CMakeLists.txt")

    def test_where_allowed(self):
        self.assertEqual([], errors("server/memory/device_arena.cc", "cudaMalloc(&p, 1);\n"))
        self.assertEqual([], errors("README.md", "std::mutex is banned, detach() too\n"))
        self.assertEqual([], errors("server/head/a.cc", "absl::Mutex m;\nusing std::vector;\nusing lmhead::Step;\n"))


class Shape(unittest.TestCase):
    def test_header_guard(self):
        self.assertEqual([], errors("a/b.h", GUARDED))
        self.assertEqual([], errors("a/b.h", "// Comment.\n\n" + GUARDED))
        self.assertEqual("a/b.h:1", errors("a/b.h", GUARDED.replace("A_B", "B"))[0][0])
        self.assertIn("use LMHEAD_A_B_CUH_", errors("a/b.cuh", "#pragma once\n")[0][1])

    def test_function_length(self):
        limit = tidy.MAX_FUNCTION_LINES
        before = "int G() {\n  return 1;\n}\n"
        self.assertEqual([], errors("a.cc", before + function(limit)))
        self.assertEqual([["a.cc:4", f"function of {limit + 1} lines, use functions of at most {limit}"]],
                         errors("a.cc", before + function(limit + 1)))
        self.assertEqual("a.cc:2", errors("a.cc", "class A {\n" + function(limit + 1, "  ") + "};\n")[0][0])

    def test_long_types_and_namespaces_are_no_functions(self):
        body = "int a;\n" * 200
        self.assertEqual([], errors("a.cc", "namespace lmhead {\n" + body + "}  // namespace lmhead\n"))
        self.assertEqual([], errors("a.cc", "struct A {\n" + body + "};\n"))

    def test_end_of_file(self):
        self.assertEqual([["a.md:1", "no newline at the end of the file"]], errors("a.md", "text"))
        self.assertEqual([["a.md:2", "an empty line at the end of the file"]], errors("a.md", "text\n\n"))
        self.assertEqual([], errors("a.md", ""))

    def test_unbuilt_test(self):
        test = {"tests/x/a_test.cc": ""}
        self.assertEqual(1, len(tidy.check(test)))
        self.assertEqual(1, len(tidy.check(test | {"tests/x/CMakeLists.txt": "# a_test.cc\nSRCS data_test.cc\n"})))
        self.assertEqual([], tidy.check(test | {"tests/x/CMakeLists.txt": "lmhead_test(x SRCS a_test.cc)\n"}))


if __name__ == "__main__":
    unittest.main()
