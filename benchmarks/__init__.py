"""Compares burst with its peers, from a checkout: `python -m benchmarks.attention --help`.

TransformerEngine takes the system's cuDNN, which may be older than torch's, unless CUDNN_HOME names
one (transformer_engine/common/__init__.py, 2.20.2), also one that CUDNN_PATH names, as images may.
Here it is torch's, as for burst, unless CUDNN_HOME is set.
"""

import os
from importlib.util import find_spec
from pathlib import Path

if (_torch := find_spec("torch")) and _torch.origin:
    _cudnn = Path(_torch.origin).parents[1] / "nvidia" / "cudnn"
    if _cudnn.is_dir():
        os.environ.setdefault("CUDNN_HOME", str(_cudnn))
