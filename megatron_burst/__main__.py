"""Entry point for `python -m megatron_burst SCRIPT ...`."""

import os
import sys
import time

from megatron_burst.errors import BurstError
from megatron_burst.mcore.launch import run_script

# Most refusals are the same on all ranks: a node's first rank says them and ends, upon which
# torchrun ends the others. What the first does not refuse, the others say this much later.
_LATER_S = 15

if __name__ == "__main__":
    try:
        run_script(sys.argv[1:])
    except BurstError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(_LATER_S)
        sys.exit(f"error: {error}")
