"""The configuration of a pod's ssh daemon: one key of one user logs in, nothing is forwarded."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from zeropods.errors import UserError
from zeropods.own_programs import own_programs_first
from zeropods.pods.this_pod import interface

HOST_KEY, AUTHORIZED_KEYS = "host_key", "authorized_keys"
CML_VARIABLES = ("CDSW_ENGINE_ID", "CDSW_IP_ADDRESS", "CDSW_MASTER_IP", "CDSW_PROJECT")
"""What a session is told of its pod. Of CML's variables no other: `CDSW_API_KEY` is a secret."""
FIXED = """\
PidFile none
UsePAM no
StrictModes no
AuthenticationMethods publickey
PubkeyAuthentication yes
PasswordAuthentication no
KbdInteractiveAuthentication no
HostbasedAuthentication no
PermitRootLogin prohibit-password
PermitUserEnvironment no
PermitUserRC no
DisableForwarding yes
AllowAgentForwarding no
AllowTcpForwarding no
AllowStreamLocalForwarding no
X11Forwarding no
PermitTunnel no
GatewayPorts no
LoginGraceTime 20
MaxStartups 100:30:200
MaxSessions 100
ClientAliveInterval 5
ClientAliveCountMax 3
LogLevel ERROR
PrintMotd no
PrintLastLog no
"""


def config_text(folder: Path, address: str, port: int, environment: dict[str, str]) -> str:
    """The daemon's configuration.

    Args:
        environment: set in every session; one line, since sshd heeds only the first `SetEnv`.
    """
    head = {
        "ListenAddress": address,
        "Port": str(port),
        "HostKey": _quoted(str(folder / HOST_KEY)),
        "AuthorizedKeysFile": _quoted(str(folder / AUTHORIZED_KEYS).replace("%", "%%")),
        "AllowUsers": account(),
        "SetEnv": " ".join(_quoted(f"{name}={value}") for name, value in environment.items()),
    }
    return "".join(f"{name} {value}\n" for name, value in head.items()) + FIXED


def session_environment(address: str) -> dict[str, str]:
    """What every ssh session of this pod has: this Python and its programs come first, then what the agent has."""
    found = {"PATH": own_programs_first(os.environ.get("PATH")), "ZEROPODS_POD": address}
    # gloo would take the interface of the host's name, which on Debian is loopback.
    kept = {name: os.environ.get(name) for name in ("LD_LIBRARY_PATH", *CML_VARIABLES)}
    kept["GLOO_SOCKET_IFNAME"] = interface(address)
    return {**found, **{name: value for name, value in kept.items() if value}}


def account() -> str:
    """This user's name, the only one that may log in."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise UserError(f"user {os.geteuid()}: has no line in /etc/passwd, and sshd refuses who has none") from None


def _quoted(text: str) -> str:
    if '"' in text or not text.isprintable():
        raise UserError(f"{text!r}: has characters that an sshd configuration cannot hold; choose another name")
    return f'"{text}"'
