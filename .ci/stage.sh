#!/usr/bin/env bash
# Runs one stage of `make demo` or `make test`: prints its name first, and its time and outcome last.
#
# Usage: stage.sh NAME COMMAND [ARGUMENT…]
set -uo pipefail
name=$1
shift
start=$(date +%s)
echo "==== $name"
"$@"
rc=$?
seconds=$(($(date +%s) - start))
if [ $rc -ne 0 ]; then
  echo "==== $name: FAILED with exit status $rc after $seconds s" >&2
  exit $rc
fi
echo "==== $name: $seconds s"
