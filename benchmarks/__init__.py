"""Compares burst with its peers, from a checkout: `python -m benchmarks.attention --help`.

TransformerEngine's library needs cuDNN's parts by name (libcudnn_graph.so.9, ...), so the loader
takes the system's, which may be older than torch's: then all of the process runs that. CUDNN_HOME
alone does not help. Here torch's are loaded before, unless CUDNN_HOME is set.
"""

import ctypes
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


def load_cudnn_of(torch: Path) -> None:
    """Load all of the cuDNN that was installed with torch, if any, before another is found."""
    home = torch.parents[1] / "nvidia" / "cudnn"
    if not home.is_dir() or "CUDNN_HOME" in os.environ:
        return
    os.environ["CUDNN_HOME"] = str(home)
    import_module("torch")  # loads the CUDA libraries that they need
    for library in sorted((home / "lib").glob("libcudnn*.so.*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


if (_torch := find_spec("torch")) and _torch.origin:
    load_cudnn_of(Path(_torch.origin))
