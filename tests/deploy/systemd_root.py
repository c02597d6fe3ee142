#!/usr/bin/env python3
"""Boots a bare Debian with systemd, in a container, and has the unit of the package do there what docs/OPERATING.md says of it.

Usage: systemd_root.py FOLDER-OF-PACKAGES --work FOLDER [--base BASE.tar] [--keep]

The service is started, looked at, stopped while a trainer works, started again from its checkpoint, upgraded, switched to TLS by the manual's own commands, and
purged; all confined as the unit confines it. Needs root and systemd-nspawn. Minutes: not part of `make test`.
"""

import pathlib
import shutil
import subprocess
import sys

from deb_root import Root, make_root, options_given, packages_of, say
from docker_stages import Mounts, remove
from manual import block

CHECK_SECONDS = 300  # Then the container ends by itself.

UNIT = """\
[Unit]
After=multi-user.target
[Service]
Type=oneshot
TimeoutStartSec={seconds}
WorkingDirectory=/srv
ExecStart=/bin/bash -eu -o pipefail -x /srv/check.sh
StandardOutput=file:/srv/output
StandardError=inherit
ExecStopPost=/bin/systemctl poweroff --no-block
"""

CHECK = """\
wait_for() {{ for _ in $(seq 200); do if "$@"; then return; fi; sleep 0.3; done; return 1; }}
trained() {{ lmhead status | grep -E '^demo-.* step ([2-9]|[0-9]{{2,}}) '; }}
with_tls() {{ journalctl -u lmhead --no-pager | grep 'TLS: presenting'; }}
pid() {{ systemctl show -p MainPID --value lmhead; }}

# From the manual: starting. `status` right after it has to be answered.
systemctl enable --now lmhead
lmhead status
lmhead doctor --listen=127.0.0.1:0
test "$(systemctl show -p User --value lmhead)" = lmhead
! ss -Hltn | grep -v '127\\.0\\.0\\.1' | grep -E ':(50051|9464) '

# A stop while a trainer is at work: in order, with a checkpoint, and what was trained is there again.
lmhead demo --address=127.0.0.1:50051 --steps=100000 > demo.log 2>&1 & trainer=$!
wait_for trained
systemctl stop lmhead
test "$(systemctl show -p Result --value lmhead)" = success
test "$(systemctl show -p ExecMainStatus --value lmhead)" = 0
kill $trainer; wait $trainer || true
ls /var/lib/lmhead/demo-*/step-*/manifest.json
systemctl start lmhead
wait_for trained

# An upgrade ends nothing.
before=$(pid)
dpkg -i /srv/lmhead_*.deb
test "$(pid)" = "$before"
systemctl is-enabled lmhead

# From the manual: certificates, and the unit with them.
{certificates}
{tls}
wait_for with_tls
if lmhead status; then exit 1; fi

# Nothing stays but the state.
dpkg --purge lmhead
if systemctl is-active lmhead; then exit 1; fi
if systemctl is-enabled lmhead; then exit 1; fi
ls /var/lib/lmhead/demo-*/step-*/manifest.json
touch /srv/passed
"""


def main():
    options = options_given()
    root = make_root(options.work, options.base)
    server = next(deb for deb in packages_of(options.packages) if deb.name.startswith("lmhead_"))
    shutil.copy(server, root.folder / "srv")
    with Mounts(root.folder):
        say(f"apt install {server.name}")
        root.run("apt-get", "update", "-q")
        root.run("apt-get", "install", "-y", "-q", "--no-install-recommends", "openssl", "iproute2", "dbus", f"/srv/{server.name}")
    check(root)
    if not options.keep:
        remove(root.folder)
    say("started by systemd, trained, stopped, restored, upgraded, switched to TLS, purged")


def check(root: Root):
    srv = root.folder / "srv"
    script = CHECK.format(certificates=block("Security", "ec_paramgen_curve"), tls=block("systemd", "/etc/lmhead"))
    (srv / "check.sh").write_text(script)
    (root.folder / "etc/systemd/system/check.service").write_text(UNIT.format(seconds=CHECK_SECONDS))
    say("boot")
    subprocess.run(["systemd-nspawn", "-q", "--register=no", "--keep-unit", "--private-network", "-D", root.folder, "-b",
                    "systemd.wants=check.service"], timeout=2 * CHECK_SECONDS, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    print((srv / "output").read_text())
    if not (srv / "passed").exists():
        raise SystemExit("deb: the unit did not do what the manual says; the last command above failed")


if __name__ == "__main__":
    sys.exit(main())
