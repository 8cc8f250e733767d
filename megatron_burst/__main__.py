"""Entry point for `python -m megatron_burst SCRIPT ...`."""

import sys

from megatron_burst.errors import BurstError
from megatron_burst.mcore.launch import run_script

if __name__ == "__main__":
    try:
        run_script(sys.argv[1:])
    except BurstError as error:
        sys.exit(f"error: {error}")
