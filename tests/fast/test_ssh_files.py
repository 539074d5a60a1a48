"""Keys, pinned host keys and the ssh configuration, read back by OpenSSH's own programs."""

import subprocess
from pathlib import Path

import pytest

from zeropods.errors import UserError
from zeropods.pods.ssh import pdsh_ssh_arguments, ssh_argv, ssh_config_text

OPTIONS = {
    "user": "me", "port": "2222", "identitiesonly": "yes", "identityagent": "none", "globalknownhostsfile": "/dev/null",
    "stricthostkeychecking": "true", "batchmode": "yes", "connecttimeout": "2", "serveraliveinterval": "2",
    "serveralivecountmax": "3", "loglevel": "ERROR", "forwardagent": "no", "forwardx11": "no", "controlmaster": "false",
}  # fmt: skip


def effective(config: Path, host: str) -> dict[str, str]:
    """What ssh makes of a configuration, by option in lower case; nothing is connected."""
    done = subprocess.run(
        ["ssh", "-G", "-F", str(config), host], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 0, done.stderr
    return {name: value for name, _, value in (line.partition(" ") for line in done.stdout.splitlines())}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "ssh_config"
    path.write_text(ssh_config_text(["127.0.1.1", "pod2"], 2222, tmp_path / "id", tmp_path / "known", "me"))
    return path


def test_ssh_reads_the_options_for_a_pod_and_for_no_other_host(config: Path) -> None:
    found = effective(config, "pod2")
    assert {name: found[name] for name in OPTIONS} == OPTIONS
    assert effective(config, "127.0.1.9")["port"] == "22"


def test_users_own_configuration_is_used_with_strict_host_keys() -> None:
    argv = ssh_argv(None, "pod2", ["true"])
    assert "-F" not in argv and "StrictHostKeyChecking=yes" in argv and "BatchMode=yes" in argv


@pytest.mark.parametrize("name", ["my home", 'quo"te', "100%host", "${HOME}", "ünï"])
def test_a_path_that_pdsh_or_ssh_would_change_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="pdsh cannot be told this path; set ZEROPODS_HOME to a folder of letters"):
        pdsh_ssh_arguments(Path("/", name, "ssh_config"))
