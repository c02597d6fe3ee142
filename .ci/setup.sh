#!/usr/bin/env bash
# Installs what the build and the checks need, by package name. Debian 12 and Ubuntu 24.04.
# all also makes build/python, with what the tests of deploy/ need of Python's package index.
#
# Usage: setup.sh [build|all]     build: what `make demo` needs; all (default): also the checkers of `make test`.
# A run with nothing missing asks no network. Without root it prints the command to run and exits 1.
set -euo pipefail
cd "$(dirname "$0")/.."

build=(
  g++ make cmake ninja-build pkg-config git ca-certificates
  libgrpc++-dev libgrpc-dev protobuf-compiler protobuf-compiler-grpc libprotobuf-dev libabsl-dev
  libc-ares-dev libre2-dev libssl-dev zlib1g-dev
  prometheus-cpp-dev libdnnl-dev libgloo-dev nlohmann-json3-dev libspdlog-dev libxxhash-dev
  libgtest-dev libgmock-dev
)
# Version 14 of the LLVM tools by name: both systems have it, and formatting differs between versions.
checks=(clang-format-14 clang-tidy-14 dpkg-dev file python3 python3-protobuf python3-venv shellcheck curl prometheus systemd openssl lintian debootstrap)
# For the tests of the Python package.
python=(python3-torch python3-numpy python3-pip python3-setuptools python3-wheel patchelf)

case "${1:-all}" in
  build) wanted=("${build[@]}") ;;
  all) wanted=("${build[@]}" "${checks[@]}" "${python[@]}") ;;
  *) echo "setup: got '$1', wanted build or all" >&2; exit 2 ;;
esac

if ! command -v dpkg-query >/dev/null; then
  echo "setup: this system has no dpkg; install the equivalents of: ${wanted[*]}" >&2
  exit 1
fi

# A list of Python packages that has changed makes the folder anew.
python_packages() {
  local folder=build/python list=tests/deploy/requirements.txt
  if cmp -s "$list" "$folder/requirements.txt"; then
    return
  fi
  echo "setup: Python packages in $folder"
  rm -rf "$folder"
  /usr/bin/python3 -m venv "$folder"
  "$folder/bin/pip" install -q --disable-pip-version-check -r "$list"
  cp "$list" "$folder/requirements.txt"
}

# Virtual packages (pkg-config on Ubuntu) have no dpkg entry of their own: a provider counts.
installed=$(dpkg-query -W -f '${db:Status-Status} ${Package} ${Provides}\n' |
  sed -n 's/^installed //p' | sed 's/([^)]*)//g' | tr ', ' '\n\n' | sort -u)
missing=()
for package in "${wanted[@]}"; do
  grep -qxF -- "$package" <<<"$installed" || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  echo "setup: all ${#wanted[@]} packages are installed"
  if [ "${1:-all}" = all ]; then python_packages; fi
  exit 0
fi

echo "setup: missing: ${missing[*]}"
if [ "$(id -u)" -ne 0 ]; then
  {
    echo "setup: not root; run this, then start again:"
    echo "  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}"
  } >&2
  exit 1
fi
# Only prometheus's promtool is wanted: SYSTEMD_OFFLINE keeps the package from starting its service now, and disable
# keeps it from starting later.
export DEBIAN_FRONTEND=noninteractive SYSTEMD_OFFLINE=1
apt-get update -q
if ! apt-cache show python3-torch >/dev/null 2>&1; then
  echo "setup: this release has no python3-torch: the tests of the Python package will be skipped"
  mapfile -t missing < <(printf '%s\n' "${missing[@]}" | grep -vx python3-torch)
fi
apt-get install -y -q --no-install-recommends -o Dpkg::Use-Pty=0 "${missing[@]}"
case " ${missing[*]} " in
  *" prometheus "*) ! command -v systemctl >/dev/null || systemctl disable prometheus || true ;;
esac
if [ "${1:-all}" = all ]; then python_packages; fi
