#!/usr/bin/env python3
"""The project's habits as a failing check, on every tracked text file: `path:line: error: what is wrong, what to do`.

Usage: tidy.py ROOT
"""

import pathlib
import re
import subprocess
import sys

CODE = {".h", ".cc", ".c", ".cu", ".cuh"}
MAX_FUNCTION_LINES = 100

# (pattern, what to say, suffixes or None for all, path prefixes where it is allowed). Brackets around single letters
# keep a pattern from finding itself.
BANS = [(re.compile(pattern), message, suffixes, allowed) for pattern, message, suffixes, allowed in (
    (r"\b(cudaMalloc\w*|cudaHostAlloc|cudaFree\w*)\b", "is banned, use DeviceArena or StagingPool", CODE,
     ("server/memory/", "tests/")),
    (r"\bstd::(mutex|recursive_mutex|shared_mutex|timed_mutex|condition_variable\w*)\b",
     "is banned, use absl::Mutex", CODE, ()),
    (r"\bstd::(lock_guard|unique_lock|scoped_lock|shared_lock)\b", "is banned, use absl::MutexLock", CODE, ()),
    (r"\.detach\(\)", "is banned, own the thread and use join()", CODE, ()),
    (r"^\s*using namespace\b", "is banned, use the names one by one", CODE, ()),
    (r"\b(sprintf|strcpy|strcat|gets)\(", "is banned, use absl::StrFormat or absl::StrAppend", CODE, ()),
    (r"\bDISABLED_\w+", "is banned, use GTEST_SKIP() with the reason, or mend the test", CODE, ()),
    (r"^\s*#\s*if\s+0\b", "is banned, use the version history", CODE, ()),
    (r"\bfile\(\s*GLOB\w*", "is banned, use a list of names", {".txt", ".cmake"}, ()),
    (r"\b(TOD[O]|FIXM[E]|XX[X]|HAC[K])\b", "is banned, use the issue tracker", None, ()),
    (r"/(?:wor[k]|far[m]|roo[t]|hom[e]/[a-z]\w*)/", "is a path of one machine, use a relative path or a setting", None, ()),
    (r"\b(?:[a-z0-9-]+\.)*(?:pyp[i]|pythonhoste[d]|npmj[s]|crate[s]|rubygem[s]|debia[n]|ubunt[u]|docke[r]|gh?c[r]|nvc[r]|qua[y])"
     r"\.(?:org|io|com|net)\b", "is a registry's host, use the package's name", None, ()),
    (r"[ \t]+$", "blanks at the end of the line", None, ()),
)]


def header_guard(file, lines):
    if pathlib.PurePath(file).suffix not in {".h", ".cuh"}:
        return
    guard = "LMHEAD_" + re.sub(r"[^A-Z0-9]", "_", file.upper()) + "_"
    directives = [(number, line.split()) for number, line in enumerate(lines, 1) if line.startswith("#")]
    if [words for _, words in directives[:2]] != [["#ifndef", guard], ["#define", guard]]:
        yield directives[0][0] if directives else 1, f"header guard is missing or has another name, use {guard}"


def long_functions(file, lines):
    """A body closes with a bare `}` in the column where its signature starts; Google style leaves only functions so."""
    if pathlib.PurePath(file).suffix not in CODE:
        return
    opened = {}  # Indent -> line number where something started in that column.
    for number, line in enumerate(lines, 1):
        match = re.match(r"( ?| {2})([^\s#/].*)$", line)
        if not match:
            continue
        indent, text = len(match[1]), match[2]
        if text == "}":
            start = opened.pop(indent, None)
            if start is not None and number - start >= MAX_FUNCTION_LINES:
                yield start, f"function of {number - start + 1} lines, use functions of at most {MAX_FUNCTION_LINES}"
        elif text.startswith("}"):
            opened.pop(indent, None)  # A namespace, a type, an else.
        elif not text.endswith(":"):
            opened[indent] = number


def banned(file, lines):
    suffix = pathlib.PurePath(file).suffix
    for pattern, message, suffixes, allowed in BANS:
        if (suffixes and suffix not in suffixes) or (allowed and file.startswith(allowed)):
            continue
        for number, line in enumerate(lines, 1):
            for match in pattern.finditer(line):
                yield number, f"{match[0].strip()} {message}".strip()


def last_line(file, lines):
    if lines and lines[-1] != "":
        yield len(lines), "no newline at the end of the file"
    elif lines[-2:] == ["", ""]:
        yield len(lines) - 1, "an empty line at the end of the file"


def unbuilt_tests(files):
    """A *_test.cc that no CMakeLists.txt of its folder or above names is never run."""
    for file in files:
        if not file.endswith("_test.cc"):
            continue
        name, built = pathlib.PurePath(file).name, False
        for folder in pathlib.PurePath(file).parents:
            names = files.get((folder / "CMakeLists.txt").as_posix(), "")
            names = re.sub(r"#.*", "", names)
            built = built or re.search(rf"(?<![\w-]){re.escape(name)}", names)
        if not built:
            yield f"{file}:1: error: no CMakeLists.txt builds this test, use lmhead_test(… SRCS {name})"


def check(files):
    """`files` maps a path to its text."""
    errors = []
    for file, text in sorted(files.items()):
        lines = text.split("\n")
        for rule in (header_guard, long_functions, banned, last_line):
            errors += [f"{file}:{number}: error: {message}" for number, message in rule(file, lines)]
    return errors + list(unbuilt_tests(files))


def tracked_text(root):
    names = subprocess.run(["git", "-C", root, "ls-files", "-z"], check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        path = pathlib.Path(root, name)
        if not path.is_file() or path.is_symlink():
            continue
        try:
            yield name, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            pass  # Not text.


def main(root):
    errors = check(dict(tracked_text(root)))
    print("\n".join(errors + [f"tidy: {len(errors)} errors"]))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
