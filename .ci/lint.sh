#!/usr/bin/env bash
# The checks that need no build: formatting, layers, tidy, the API's shape, shell scripts, and the checkers' own tests.
# Prints every finding of every check before it fails.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
failed=()
python=/usr/bin/python3  # The one that the system's python3-protobuf belongs to.

check() {
  local name=$1
  shift
  echo "-- $name"
  "$@" || failed+=("$name")
}

formatting() {
  git ls-files -z '*.h' '*.cc' '*.c' '*.cu' '*.cuh' |
    xargs -0 -r "$(command -v clang-format-14 || echo clang-format)" --dry-run -Werror --style=file
}

proto_lint() {
  local descriptors protos rc
  descriptors=$(mktemp)
  mapfile -t protos < <(git ls-files 'proto/lmhead/*.proto')
  protoc --proto_path=proto --include_source_info --descriptor_set_out="$descriptors" "${protos[@]}" &&
    "$python" .ci/proto_lint.py "$descriptors"
  rc=$?
  rm -f "$descriptors"
  return $rc
}

shell_scripts() {
  git grep -lzE '^#!.*(bash|/sh)' -- ':!*.md' | xargs -0 -r shellcheck --severity=warning
}

export PYTHONDONTWRITEBYTECODE=1
check "tests of the checkers" "$python" -m unittest discover -q -s .ci -p 'test_*.py'
check "clang-format" formatting
check "layers" "$python" .ci/check_includes.py .ci/layers.txt .
check "tidy" "$python" .ci/tidy.py .
check "proto lint" proto_lint
check "shellcheck" shell_scripts

if [ ${#failed[@]} -gt 0 ]; then
  echo "lint: failed: ${failed[*]}" >&2
  exit 1
fi
