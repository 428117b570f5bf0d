"""torchrun on two hosts. Network namespaces stand for the hosts, and each host's own name is a loopback address."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from covering import is_full

from pagewise.engine.__main__ import main

SCRIPT = Path(__file__).with_name("two_hosts.sh")
UNSHARE = ["unshare", "--map-root-user", "--net", "--mount", "--uts"]


def can_unshare() -> bool:
    """Whether this machine lets a user make the namespaces and connect them."""
    link = ["ip", "link", "add", "one", "type", "veth", "peer", "name", "two"]
    try:
        return subprocess.run([*UNSHARE, *link], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not is_full(), reason="starts torchrun on two hosts three times: make test-full")
@pytest.mark.parametrize("master", ["4", "6", "name"])
def test_two_hosts_give_the_text_of_one_process(master, tmp_path, capsys):
    """The address of the first host is one of IPv4, one of IPv6, or a name that each host resolves differently."""
    if not can_unshare():
        pytest.skip("needs user namespaces, unshare and ip")
    flags = ["The block table", "--device", "cpu", "--num-blocks", "32", "--max-tokens", "12", "--temperature", "0"]
    assert main([*flags, "--tensor-parallel", "1"]) == 0
    command = [*UNSHARE, "bash", str(SCRIPT), str(tmp_path), master, "pagewise.engine", *flags]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert (done.returncode, done.stdout) == (0, capsys.readouterr().out), done.stderr
