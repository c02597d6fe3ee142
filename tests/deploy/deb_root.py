#!/usr/bin/env python3
"""Installs the Debian packages on a bare system, uses them, and purges them: in a folder, by chroot.

Usage: deb_root.py FOLDER-OF-PACKAGES --work FOLDER [--base BASE.tar] [--keep]

BASE.tar is a bare Debian 12; without it debootstrap makes one. apt takes the dependencies from the network. The server is started as the
unit starts it: as its user, with its flags; `lmhead status` has to answer, SIGTERM has to end it with status 0, and a purge may leave nothing but
the state and its user. Needs root. bare_root_test.py does
the same with the packages of the tested build, where the machine lets it.
"""

import argparse
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

from docker_stages import Mounts, remove

START_SECONDS = 60
# A network that does not answer ends it.
BOOTSTRAP_SECONDS = 600
APT = ("apt-get", "-q", "-o", "Acquire::http::Timeout=20", "-o", "Acquire::Retries=1")
INSTALL = (*APT, "install", "-y", "--no-install-recommends")


def say(text):
    print(f"deb: {text}", flush=True)


class Root:
    def __init__(self, folder):
        self.folder = folder

    def start(self, *command, user=None, **options):
        by = [f"--userspec={user}"] if user else []
        environment = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
        environment |= {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
        return subprocess.Popen(["chroot", *by, self.folder, *map(str, command)], env=environment, **options)

    def run(self, *command, **options):
        process = self.start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
        output, _ = process.communicate()
        if process.returncode != 0:
            raise SystemExit(f"deb: {shlex.join(map(str, command))}: status {process.returncode}\n{output[-4000:]}")
        return output

    def files(self):
        listed = subprocess.run(["find", self.folder, "-xdev", "-name", "*lmhead*"], check=True, capture_output=True, text=True)
        return {line.removeprefix(str(self.folder)) for line in listed.stdout.splitlines()}


def packages_of(folder):
    found = sorted(folder.glob("*lmhead*.deb"))
    names = [deb.name.split("_")[0] for deb in found]
    if sorted(names) != ["liblmhead-dev", "liblmhead0", "lmhead"]:
        raise SystemExit(f"deb: {folder} has {names}, wanted lmhead, liblmhead0 and liblmhead-dev, each once: make package")
    return found


def make_root(folder, base):
    remove(folder)
    folder.mkdir(parents=True)
    if base:
        subprocess.run(["tar", "-C", folder, "-xf", base], check=True)
    else:
        subprocess.run(["debootstrap", "--variant=minbase", "bookworm", folder], check=True, timeout=BOOTSTRAP_SECONDS)
    # The network as this machine has it.
    shutil.copy("/etc/resolv.conf", folder / "etc/resolv.conf")
    shutil.copytree("/etc/apt/apt.conf.d", folder / "etc/apt/apt.conf.d", dirs_exist_ok=True)
    return Root(folder)


def unit_command(root):
    """What systemd would start: the flags of the unit, then those of the environment file, which has none."""
    unit = (root.folder / "usr/lib/systemd/system/lmhead.service").read_text()
    command = re.search(r"^ExecStart=((?:.*\\\n)*.*)", unit, re.M)[1].replace("\\\n", " ")
    return [word for word in shlex.split(command) if word != "$LMHEAD_FLAGS"]


def serve(root):
    for folder in ("run/lmhead", "var/lib/lmhead"):  # RuntimeDirectory and StateDirectory.
        (root.folder / folder).mkdir(parents=True, exist_ok=True)
        root.run("chown", "lmhead:lmhead", "/" + folder)
    command = unit_command(root) + ["--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0"]
    server = root.start(*command, user="lmhead:lmhead")
    try:
        ready = root.folder / "run/lmhead/ready.json"
        end = time.time() + START_SECONDS
        while not ready.exists():
            if server.poll() is not None or time.time() > end:
                raise SystemExit(f"deb: the server is not ready (status {server.poll()}): {shlex.join(command)}")
            time.sleep(0.1)
        address = re.search(r'"address": *"([^"]+)"', ready.read_text())[1]
        print(root.run("lmhead", "status", f"--address={address}"))
        server.send_signal(signal.SIGTERM)
        if server.wait(timeout=START_SECONDS) != 0:
            raise SystemExit(f"deb: SIGTERM ended the server with status {server.returncode}, wanted 0")
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def fetch(root, packages):
    """The packages, and from the network what they depend on."""
    for deb in packages:
        shutil.copy(deb, root.folder / "srv" / deb.name)
    root.run(*APT, "update", "--error-on=any")
    root.run(*INSTALL, "--download-only", *(f"/srv/{deb.name}" for deb in packages))


def check(root, packages):
    before = root.files()
    say("apt install " + " ".join(deb.name for deb in packages))
    root.run(*INSTALL, *(f"/srv/{deb.name}" for deb in packages))
    for deb in packages:
        (root.folder / "srv" / deb.name).unlink()
    say("user " + root.run("id", "lmhead").strip())
    say("ldconfig " + root.run("ldconfig", "-p").partition("liblmhead")[1])
    serve(root)
    say("apt purge")
    root.run(*APT, "purge", "-y", "lmhead", "liblmhead0", "liblmhead-dev")
    left = {name for name in root.files() - before if not name.startswith(("/var/lib/lmhead", "/run/lmhead"))}
    if left:
        raise SystemExit(f"deb: the purge left {sorted(left)}")


def options_given():
    parser = argparse.ArgumentParser()
    parser.add_argument("packages", type=pathlib.Path)
    parser.add_argument("--work", required=True, type=pathlib.Path)
    parser.add_argument("--base", type=pathlib.Path)
    parser.add_argument("--keep", action="store_true", help="leave the root in the work folder")
    return parser.parse_args()


def main():
    options = options_given()
    packages = packages_of(options.packages)
    root = make_root(options.work, options.base)
    with Mounts(root.folder):
        fetch(root, packages)
        check(root, packages)
    if not options.keep:
        remove(root.folder)
    say("installed, served, answered, stopped, purged")


if __name__ == "__main__":
    sys.exit(main())
