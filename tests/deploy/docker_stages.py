#!/usr/bin/env python3
"""Runs a Dockerfile without a container engine: each stage in a folder of its own, its RUN steps by chroot.

Usage: docker_stages.py DOCKERFILE --base BASE.tar --work FOLDER [--image NAME=FOLDER]… [--context FOLDER] [--ccache FOLDER] [--keep]

It takes the place of `docker build` where no engine runs. Every FROM begins as BASE.tar, a bare Debian 12, unless --image says which
folder an image is (--image nvidia/cuda:13.0.2-devel-ubuntu24.04=/ takes CUDA from this machine); such a folder is only read. COPY, ENV,
WORKDIR, USER and RUN do what they say; afterwards, on a root that is read-only but for /tmp, as the last stage's USER: `lmhead doctor` has to
find nothing that keeps the image from serving, its ENTRYPOINT with CMD is started, its HEALTHCHECK and the kubelet's probe of the health port
have to succeed, and SIGTERM has to end it with status 0. Needs root, rsync and curl. Minutes, since it installs and compiles: not part of `make test`.
--ccache keeps what was compiled in that folder, for the next time.
"""

import argparse
import ctypes
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import health

# Of unshare(2).
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
# Where a stage finds what was compiled before.
CCACHE = "var/cache/ccache"


class Stage:
    def __init__(self, name, root, read_only):
        self.name, self.root, self.read_only = name, root, read_only
        self.env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
        self.folder, self.user = "/", None
        self.entrypoint, self.command, self.health = [], [], []

    def path(self, inside):
        inside = os.path.normpath(os.path.join(self.folder, inside))
        return pathlib.Path(self.root, inside.lstrip("/"))


def instructions(text):
    """(word, arguments) of each instruction: comments dropped, continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        word, _, rest = line.strip().partition(" ")
        yield word.upper(), rest.strip()


def ignored(context):
    return [line.strip() for line in (context / ".dockerignore").read_text().splitlines() if line.strip() and line[0] != "#"]


def remove(root):
    """Never through a mount that an interrupted run has left: /dev is this machine's."""
    subprocess.run(["rm", "-rf", "--one-file-system", root], check=True)


class Builder:
    def __init__(self, context, base, work, images, ccache=None):
        self.context, self.base, self.work, self.images, self.ccache = context, base, work, images, ccache
        self.stages = []

    def begin(self, arguments):
        image, *rest = arguments.split()
        name = rest[1] if rest else f"stage{len(self.stages)}"
        if image in self.images:
            self.stages.append(Stage(name, pathlib.Path(self.images[image]), read_only=True))
            return
        root = self.work / name
        remove(root)
        root.mkdir(parents=True)
        subprocess.run(["tar", "-C", root, "-xf", self.base], check=True)
        # What a container gets from its engine.
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
        for conf in pathlib.Path("/etc/apt/apt.conf.d").glob("*prox*"):
            shutil.copy(conf, root / "etc/apt/apt.conf.d" / conf.name)
        self.stages.append(Stage(name, root, read_only=False))

    def copy(self, arguments):
        stage = self.stages[-1]
        words = shlex.split(arguments)
        source_root, excludes = self.context, ignored(self.context)
        if words[0].startswith("--from="):
            name = words.pop(0)[len("--from="):]
            source_root, excludes = next(s.root for s in self.stages if s.name == name), []
        *sources, destination = words
        named = [path for name in sources for path in sorted(source_root.glob(name.strip("/")) if name != "." else [source_root])]
        if not named:
            raise SystemExit(f"stages: {stage.name}: nothing to copy: COPY {arguments}")
        for source in named:
            target = stage.path(destination)
            is_folder = source.is_dir()
            (target if is_folder or destination.endswith("/") else target.parent).mkdir(parents=True, exist_ok=True)
            # The contents of a folder, links kept, as COPY does it.
            subprocess.run(["rsync", "-a", "--no-owner", "--no-group", *(f"--exclude={e.replace('**/', '')}" for e in excludes),
                            f"{source}/" if is_folder else source, f"{target}/" if is_folder or destination.endswith("/") else target],
                           check=True)

    def run(self, stage, command, **options):
        environment = dict(stage.env, **{k: v for k, v in os.environ.items() if k.lower().endswith("_proxy")})
        user = ["--userspec", stage.user, "--groups", ""] if stage.user else []
        return subprocess.Popen(["chroot", *user, stage.root, "/bin/sh", "-c", f"cd {stage.folder} && {command}"], env=environment,
                                **options)

    def run_step(self, stage, command):
        with Mounts(stage.root, self.ccache):
            if self.ccache and "cmake" in command:
                command = f"apt-get update -q && apt-get install -y -q ccache && export CCACHE_DIR=/{CCACHE} && {command}"
            if self.run(stage, command).wait() != 0:
                raise SystemExit(f"stages: {stage.name}: failed: RUN {command}")

    def apply(self, word, arguments):
        stage = self.stages[-1] if self.stages else None
        if word == "FROM":
            self.begin(arguments)
        elif word == "COPY":
            self.copy(arguments)
        elif word == "WORKDIR":
            stage.folder = os.path.normpath(os.path.join(stage.folder, arguments))
            stage.path(".").mkdir(parents=True, exist_ok=True)
        elif word == "ENV":
            stage.env.update(pair.split("=", 1) for pair in shlex.split(arguments))
        elif word == "USER":
            stage.user = arguments
        elif word == "RUN":
            self.run_step(stage, arguments)
        elif word == "ENTRYPOINT":
            stage.entrypoint = json.loads(arguments)
        elif word == "CMD":
            stage.command = json.loads(arguments)
        elif word == "HEALTHCHECK":
            stage.health = json.loads(arguments[arguments.index("CMD") + 3:])
        elif word not in ("LABEL", "EXPOSE"):
            raise SystemExit(f"stages: {word} is not known here")


class Mounts:
    """/proc and /dev in a root, and a folder for compiled objects if there is one, for as long as the block."""

    def __init__(self, root, ccache=None):
        self.root, self.ccache = root, ccache

    def __enter__(self):
        subprocess.run(["mount", "-t", "proc", "proc", self.root / "proc"], check=True)
        subprocess.run(["mount", "--bind", "/dev", self.root / "dev"], check=True)
        if self.ccache:
            (self.root / CCACHE).mkdir(exist_ok=True)
            subprocess.run(["mount", "--bind", self.ccache, self.root / CCACHE], check=True)

    def __exit__(self, *_):
        for folder in [CCACHE] * bool(self.ccache) + ["dev", "proc"]:
            subprocess.run(["umount", "-l", self.root / folder], check=True)


def own_mounts(also=0):
    """From here on what this process mounts is its own, and ends with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS | also) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def be_alone():
    """Mounts of this process's own, and a network, so that the image's fixed ports are free."""
    own_mounts(CLONE_NEWNET)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def read_only(root):
    """The root as `docker run --read-only --tmpfs /tmp` gives it."""
    subprocess.run(["mount", "--bind", root, root], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", root], check=True)
    subprocess.run(["mount", "-t", "proc", "proc", root / "proc"], check=True)
    subprocess.run(["mount", "--rbind", "/dev", root / "dev"], check=True)
    for folder in ("tmp", "dev/shm"):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root / folder], check=True)


def check_doctor(builder, stage):
    # The arguments of the command are serve's, and so are doctor's. What is only a warning belongs to the machine: its clock, its limits.
    doctor = builder.run(stage, shlex.join(stage.entrypoint + ["doctor"] + stage.command[1:]), stdout=subprocess.PIPE, text=True)
    output, _ = doctor.communicate()
    print(output, end="", flush=True)
    if doctor.returncode != 0:
        raise SystemExit(f"stages: lmhead doctor: status {doctor.returncode}, wanted 0")


def probe_health(stage):
    port = next(a for a in stage.command if a.startswith("--health_listen=")).rpartition(":")[2]
    for service in ("readiness", "liveness"):
        if health.probe(f"127.0.0.1:{port}", service) != health.SERVING:
            raise SystemExit(f"stages: the health port says that {service} is not SERVING")


def check_service(builder, stage):
    """What the image starts: looked at by doctor, waited for by its health check, asked by the kubelet's probe, stopped."""
    be_alone()
    read_only(stage.root)
    check_doctor(builder, stage)
    server = builder.run(stage, "exec " + shlex.join(stage.entrypoint + stage.command))
    try:
        status = None
        for _ in range(60):
            time.sleep(0.5)
            status = builder.run(stage, shlex.join(stage.health), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait()
            if status == 0 or server.poll() is not None:
                break
        if status != 0:
            raise SystemExit(f"stages: the health check failed: {shlex.join(stage.health)}")
        probe_health(stage)
        server.send_signal(signal.SIGTERM)
        if server.wait(timeout=30) != 0:
            raise SystemExit(f"stages: SIGTERM ended the service with status {server.returncode}, wanted 0")
    finally:
        if server.poll() is None:
            server.kill()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dockerfile", type=pathlib.Path)
    parser.add_argument("--base", required=True)
    parser.add_argument("--work", required=True, type=pathlib.Path)
    parser.add_argument("--image", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--context", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2])
    parser.add_argument("--ccache", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--keep", action="store_true", help="leave the roots in the work folder")
    options = parser.parse_args()
    builder = Builder(options.context, options.base, options.work, dict(pair.split("=", 1) for pair in options.image),
                      options.ccache)
    for word, arguments in instructions(options.dockerfile.read_text()):
        print(f"stages: {word} {arguments[:120]}", flush=True)
        start = time.time()
        builder.apply(word, arguments)
        if word == "RUN":
            print(f"stages: {time.time() - start:.0f} s", flush=True)
    last = builder.stages[-1]
    size = sum(f.lstat().st_size for f in (last.root / "opt/lmhead").rglob("*") if not f.is_symlink())
    # In a process of its own: its mounts end with it.
    if (child := os.fork()) == 0:
        check_service(builder, last)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        raise SystemExit(f"stages: {options.dockerfile}: the image does not serve")
    if not options.keep:
        for stage in builder.stages:
            if not stage.read_only:
                remove(stage.root)
    print(f"stages: {options.dockerfile}: all steps passed, the service started, was healthy and stopped; /opt/lmhead {size >> 20} MiB")


if __name__ == "__main__":
    sys.exit(main())
