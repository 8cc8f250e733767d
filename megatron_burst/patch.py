"""Entry point for your own scripts: `import megatron_burst.patch` adds burst's flags."""

import sys

from megatron_burst.mcore.launch import prepare

prepare(sys.argv, "import megatron_burst.patch")
