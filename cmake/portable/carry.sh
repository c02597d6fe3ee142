#!/usr/bin/env bash
# Copies the shared libraries that an executable needs and a bare system lacks to lib/ beside it, then checks the whole:
# nothing else is needed, no symbol is newer than the oldest glibc supported, and the folder is small.
#
# Usage: carry.sh EXECUTABLE
set -euo pipefail
executable=$1
folder=$(dirname "$executable")
max_glibc=2.36
max_bytes=$((80 << 20))
# Sonames of glibc, and of GCC's runtime, which every system with a C++ program has.
system='^(ld-linux-.*|lib(c|m|dl|rt|pthread|resolv|gcc_s|stdc\+\+)\.so\.[0-9]+)$'
carried='^lib(dnnl|OpenCL|gomp|gloo|hiredis|ibverbs|nl-3|nl-route-3|prometheus-cpp-(core|pull)|civetweb(-cpp)?|z)\.so\.[0-9.]+$'

needed() { readelf -d "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'; }

rm -rf "${folder:?}/lib"
mkdir -p "$folder/lib"
queue=("$executable")
failed=0
while [ ${#queue[@]} -gt 0 ]; do
  object=${queue[0]}
  queue=("${queue[@]:1}")
  for name in $(needed "$object"); do
    if [[ $name =~ $system ]] || [ -e "$folder/lib/$name" ]; then
      continue
    elif ! [[ $name =~ $carried ]]; then
      echo "portable: $(basename "$object") needs $name, which is neither the system's nor carried: link its archive" \
        "or open it at run time" >&2
      failed=1
      continue
    fi
    # What the executable's own loader would take on this machine.
    path=$(ldd "$object" | awk -v name="$name" '$1 == name {print $3}')
    install -m 755 "$(readlink -f "$path")" "$folder/lib/$name"
    strip --strip-unneeded "$folder/lib/$name"
    queue+=("$folder/lib/$name")
  done
done

for object in "$executable" "$folder"/lib/*; do
  newest=$(objdump -T "$object" | grep -o 'GLIBC_[0-9.]*' | sed 's/GLIBC_//' | sort -uV | tail -n 1)
  if [ "$(printf '%s\n' "$newest" "$max_glibc" | sort -V | tail -n 1)" != "$max_glibc" ]; then
    echo "portable: $(basename "$object") needs glibc $newest, at most $max_glibc is allowed" >&2
    failed=1
  fi
done
if ! readelf -d "$executable" | grep -q '(RPATH).*\[\$ORIGIN/lib\]'; then
  echo "portable: $(basename "$executable") has no DT_RPATH of \$ORIGIN/lib" >&2
  failed=1
fi

# Hard links count once.
bytes=$(du -s -B1 --apparent-size "$folder" | cut -f1)
echo "portable: $folder: $(basename "$executable") $(stat -c %s "$executable") bytes, lib/:" \
  "$(cd "$folder/lib" && echo *); $((bytes >> 20)) MiB in all"
if [ "$bytes" -gt $max_bytes ]; then
  echo "portable: $folder has $bytes bytes, at most $max_bytes are allowed" >&2
  failed=1
fi
exit $failed
