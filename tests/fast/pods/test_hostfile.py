"""The hostfile, `master_p.py` that prints a line of one, and the ssh configuration as OpenSSH reads it back."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from zeropods.errors import UserError
from zeropods.pods.hostfile import (
    ADDRESS_VARIABLES,
    Host,
    own_slots,
    parse_hostfile,
    read_hostfile,
    write_hostfile,
)
from zeropods.pods.ssh import pdsh_ssh_arguments, ssh_config_text

SCRIPT = Path(__file__).resolve().parents[3] / "master_p.py"


def test_blanks_and_comments_change_nothing() -> None:
    text = "# mine\n\n  pod1 slots=1\t#first\r\n\tgpu-2.lan slots=8 # ünï\n"
    assert parse_hostfile(text, "hostfile") == (Host("pod1", 1), Host("gpu-2.lan", 8))


def test_the_mark_that_an_editor_puts_first_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("pod1 slots=1\n", encoding="utf-8-sig")
    assert read_hostfile(tmp_path / "hosts") == (Host("pod1", 1),)


NO_NUMBER = "no number right after 'slots='; write it without blanks, as in slots=2"
RANGE = "expected a number from 1 to 9999, as in slots=2"
NO_ADDRESS = "is not an address; expected a host name of ASCII letters, digits"
SEVERAL = "several hosts on one line; write a line '<address> slots=<gpus>' for each"
IPV6 = "IPv6 is not supported; write the host's name or its IPv4 address"


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("10.0.0.1", "no slots; write '10.0.0.1 slots=N', where N is the number of its GPUs"),
        ("10.0.0.1 # slots=2", "no slots; write '10.0.0.1 slots=N'"),
        ("10.0.0.1 slots", NO_NUMBER),
        ("10.0.0.1 slots=", NO_NUMBER),
        ("10.0.0.1 slots = 1", NO_NUMBER),
        ("10.0.0.1 slots= 1", NO_NUMBER),
        ("10.0.0.1 slots=0", f"'slots=0'; {RANGE}"),
        ("10.0.0.1 slots=-1", f"'slots=-1'; {RANGE}"),
        ("10.0.0.1 slots=1.5", f"'slots=1.5'; {RANGE}"),
        ("10.0.0.1 slots=²", f"'slots=²'; {RANGE}"),
        ("10.0.0.1 slots=10000", f"'slots=10000'; {RANGE}"),
        ("10.0.0.1 slots=1 max_slots=2", "'max_slots=2': nothing may follow the slots but a comment after '#'"),
        ("10.0.0.1 10.0.0.2 slots=1", "'10.0.0.2' is not the number of slots; expected '<address> slots=<gpus>'"),
        ("10.0.0.1 gpus=1", "'gpus=1' is not the number of slots; expected '<address> slots=<gpus>'"),
        ("10.0.0.1\u00a0slots=1", NO_ADDRESS),
        ("slots=1", "no address before the slots; expected '<address> slots=<gpus>'"),
        ("-oProxyCommand=x slots=1", NO_ADDRESS),
        ("pod[1-3] slots=1", SEVERAL),
        ("pod1,pod2 slots=1", SEVERAL),
        ("pod* slots=1", SEVERAL),
        ("me@pod1 slots=1", "a user is not part of an address; write 'pod1', and 'User me' for it in ~/.ssh/config"),
        ("root@127.0.0.1 slots=2", "write '127.0.0.1', and 'User root' for it in ~/.ssh/config or in the file of"),
        ("http://pod1/ slots=1", "http:// is not part of an address; write 'pod1'"),
        ("pod1:2222 slots=1", "a port is not part of an address; write 'pod1', and 'Port 2222' for it in"),
        ("::1 slots=1", IPV6),
        ("[::1] slots=1", IPV6),
        ("fe80::1%eth0 slots=1", IPV6),
        ("$(date) slots=1", NO_ADDRESS),
        ("pöd slots=1", NO_ADDRESS),
        (f"{'a' * 254} slots=1", NO_ADDRESS),
    ],
)
def test_a_broken_line_is_named_with_its_mistake_and_the_remedy(line: str, remedy: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_hostfile(f"# mine\n10.0.0.9 slots=1\n{line}\n", "my/hostfile")
    message = str(raised.value)
    assert message.startswith(f"my/hostfile:3: {line!r}; ") and remedy in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"\npod1 slots=1\npod2 slots=1\nPOD1 slots=2\n", r":4: 'POD1' is on line 2 already; remove one of them$"),
        (b"# nobody\n\n", r": no host; expected a line '<address> slots=<gpus>' for each pod$"),
        (None, r": no such hostfile; give your own, or one that 'zeropods pods up' wrote"),
    ],
)
def test_a_file_that_is_no_hostfile_is_named(tmp_path: Path, text: bytes | None, line: str) -> None:
    if text is not None:
        (tmp_path / "hostfile").write_bytes(text)
    with pytest.raises(UserError, match=f"^{tmp_path}/hostfile{line}"):
        read_hostfile(tmp_path / "hostfile")


def test_a_written_file_is_read_back(tmp_path: Path) -> None:
    hosts = (Host("127.0.1.1", 1), Host("127.0.1.2", 8))
    write_hostfile(tmp_path / "hostfile", hosts)
    assert read_hostfile(tmp_path / "hostfile") == hosts
    with pytest.raises(UserError, match=r"^'pod1 slots=0': expected .*, and 1 to 9999 slots$"):
        Host("pod1", 0)


# master_p.py, as its users call it


def master_p(**stated: str) -> subprocess.CompletedProcess[str]:
    """The script with only those of CML's variables that are stated."""
    kept = {name: value for name, value in os.environ.items() if name not in ADDRESS_VARIABLES}
    argv = [sys.executable, str(SCRIPT)]
    return subprocess.run(argv, env={**kept, **stated}, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize(
    ("stated", "address"),
    [
        ({"CDSW_IP_ADDRESS": "10.1.2.3", "CML_IP_ADDRESS": "10.9.9.9"}, "10.1.2.3"),
        ({"CDSW_IP_ADDRESS": "", "CML_IP_ADDRESS": "10.9.9.9"}, "10.9.9.9"),
        ({"CDSW_IP_ADDRESS": "unknown"}, None),
        ({}, None),
    ],
    ids=["older variable", "newer variable", "unknown to CML", "outside of CML"],
)
def test_it_prints_one_line_of_a_hostfile(stated: dict[str, str], address: str | None) -> None:
    done = master_p(**stated)
    (host,) = parse_hostfile(done.stdout, "master_p.py")
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    assert host.slots == own_slots() >= 1
    if address is None:
        with socket.socket() as sock:
            sock.bind((host.address, 0))
    else:
        assert host.address == address


@pytest.mark.parametrize("stated", ["pod-1", "10.1.2.3\n", "::1"])
def test_an_address_that_is_none_is_one_line_with_its_variable(stated: str) -> None:
    done = master_p(CDSW_IP_ADDRESS=stated)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"zeropods: CDSW_IP_ADDRESS: {stated!r}; expected an IPv4 address, or unset it\n"


# Keys, pinned host keys and the ssh configuration, read back by OpenSSH's own programs.

OPTIONS = {
    "user": "me", "port": "2222", "identitiesonly": "yes", "identityagent": "none", "globalknownhostsfile": "/dev/null",
    "stricthostkeychecking": "true", "batchmode": "yes", "connecttimeout": "2", "serveraliveinterval": "2",
    "serveralivecountmax": "3", "loglevel": "ERROR", "forwardagent": "no", "forwardx11": "no", "controlmaster": "false",
}  # fmt: skip


def test_ssh_reads_the_options_for_a_pod_and_for_no_other_host(tmp_path: Path) -> None:
    config = tmp_path / "ssh_config"
    config.write_text(ssh_config_text(["127.0.1.1", "pod2"], 2222, tmp_path / "id", tmp_path / "known", "me"))
    found = []
    for host in ("pod2", "127.0.1.9"):
        # Nothing is connected.
        argv = ["ssh", "-G", "-F", str(config), host]
        said = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=True).stdout
        found.append(dict(line.partition(" ")[::2] for line in said.splitlines()))
    assert {name: found[0][name] for name in OPTIONS} == OPTIONS
    assert found[1]["port"] == "22"


@pytest.mark.parametrize("name", ["my home", 'quo"te', "100%host", "${HOME}", "ünï"])
def test_a_path_that_pdsh_or_ssh_would_change_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="pdsh cannot handle this path; set ZEROPODS_HOME to a folder of letters"):
        pdsh_ssh_arguments(Path("/", name, "ssh_config"))
