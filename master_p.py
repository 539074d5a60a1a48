"""Print this pod's line of a hostfile: `ADDRESS slots=GPUS`.

    python master_p.py
    python master_p.py > hostfile

The address is the one that CML states (CDSW_IP_ADDRESS), else that of the default route, else
127.0.0.1.
"""

from __future__ import annotations

import argparse
import sys

from zeropods.errors import guarded


def main() -> None:
    """Parse the flags (there are none) and print the line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.parse_args()
    from zeropods.pods.hostfile import Host, own_address, own_slots

    print(Host(own_address(), own_slots()).line())


if __name__ == "__main__":
    sys.exit(guarded(main))
