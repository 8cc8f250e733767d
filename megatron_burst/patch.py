"""Door for scripts of one's own: `import megatron_burst.patch` first gives them burst's flags."""

import sys

from megatron_burst.mcore.launch import prepare

prepare(sys.argv, "import megatron_burst.patch")
