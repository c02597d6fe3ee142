#!/usr/bin/env bash
# clang-tidy on the C++ files that changed since the merge base with origin/main (on main itself: since the last
# commit), the most changed first and at most LMHEAD_TIDY_FILES (default 12) of them, so that its time is bounded.
#
# Usage: clang_tidy.sh BUILD_FOLDER     (configured, with generated headers built)
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
limit=${LMHEAD_TIDY_FILES:-12}
tidy=$(command -v clang-tidy-14 || command -v clang-tidy)

base=$(git merge-base HEAD origin/main 2>/dev/null || true)
if [ -z "$base" ] || [ "$base" = "$(git rev-parse HEAD)" ]; then
  base=$(git rev-parse -q --verify HEAD~1 || git hash-object -t tree /dev/null)
fi
# Only files that the build compiles: the others have no flags to be read with.
compiled=$(/usr/bin/python3 -c 'import json, sys
for entry in json.load(open(sys.argv[1])): print(entry["file"])' "$build/compile_commands.json" | sort -u)
mapfile -t changed < <(git diff --numstat --diff-filter=d "$base" -- '*.cc' | sort -rn | cut -f3 |
  while read -r file; do if grep -qxF "$PWD/$file" <<<"$compiled"; then echo "$file"; fi; done)
if [ ${#changed[@]} -eq 0 ]; then
  echo "clang-tidy: no compiled C++ file changed since ${base:0:12}"
  exit 0
fi
echo "clang-tidy: ${#changed[@]} files changed since ${base:0:12}, at most $limit are read"
printf '%s\n' "${changed[@]:0:limit}"
# The count of warnings in system headers, which clang-tidy hides but counts, is left out.
printf '%s\0' "${changed[@]:0:limit}" | xargs -0 -n 1 -P "$(nproc)" "$tidy" --quiet -p "$build" 2> >(
  grep -vE '^[0-9]+ warnings?( and [0-9]+ errors?)? generated' >&2)
