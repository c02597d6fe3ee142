#!/usr/bin/env bash
# Copies the licence of everything that a portable build links or carries: the copyright file of each Debian package that an archive,
# a carried library or a header-only library comes from. Fails when one has none.
#
# Usage: collect_licenses.sh BUILD_FOLDER DESTINATION [CUDA_DOC_FOLDER]
#   CUDA_DOC_FOLDER: a copy of /usr/share/doc of the system that CUDA was taken from; the licences of its runtime, which is linked, of cuBLAS
#     and NCCL are copied, too.
set -euo pipefail
build=$1 destination=$2 cuda_doc=${3:-}

# Files of the packages: archives by path, carried libraries by the name that the loader has for them.
mapfile -t files < <(grep -o '/[^ ]*\.a' "$build/archives.ld")
for library in "$build"/bin/lib/*; do
  files+=("$(readlink -f "$(ldconfig -p | awk -v name="$(basename "$library")" '$1 == name {print $NF; exit}')")")
done
# Header-only, or of the compiler's own runtime.
packages=(nlohmann-json3-dev libspdlog-dev libfmt-dev libxxhash-dev libstdc++-12-dev)
for file in "${files[@]}"; do
  # Where /lib is a link to /usr/lib, dpkg knows some files by the one and some by the other.
  if ! owner=$(dpkg -S "$file" 2>/dev/null || dpkg -S "${file#/usr}" 2>/dev/null); then
    echo "licenses: $file is of no package" >&2
    exit 1
  fi
  packages+=("${owner%%:*}")
done
mapfile -t packages < <(printf '%s\n' "${packages[@]}" | sort -u)

mkdir -p "$destination"
for package in "${packages[@]}"; do
  copyright=/usr/share/doc/$package/copyright
  if [ ! -e "$copyright" ]; then
    echo "licenses: $package has no $copyright" >&2
    exit 1
  fi
  cp -L "$copyright" "$destination/$package"
done
if [ -n "$cuda_doc" ]; then
  for library in cudart cublas nccl; do
    find "$cuda_doc" -path "*$library*" -name copyright -exec cp {} "$destination/$library" \;
    if [ ! -s "$destination/$library" ]; then
      echo "licenses: $cuda_doc has no copyright file of $library" >&2
      exit 1
    fi
  done
fi
echo "licenses: ${#packages[@]} packages"
