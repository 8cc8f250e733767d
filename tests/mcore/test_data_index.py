"""`plan --lengths` reads the index that Megatron writes beside a data set."""

import numpy as np
import pytest

from megatron_burst.errors import BurstError
from megatron_burst.tools.lengths import lengths_in


def test_an_index_that_megatron_wrote_has_the_lengths_of_its_documents(tmp_path):
    """Two of the four documents have several sequences."""
    from megatron.core.datasets.indexed_dataset import _IndexWriter

    path = tmp_path / "data_text_document.idx"
    with _IndexWriter(str(path), np.uint16) as writer:
        writer.write([700, 10, 20, 5000, 12, 30], None, [0, 1, 3, 5, 6])
    found = lengths_in(path)
    assert found.longest.tolist() == found.shortest.tolist() == [30, 700, 5012]
    assert found.counts.tolist() == [2, 1, 1]
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(BurstError, match="less than the 6 sequences that it names"):
        lengths_in(path)
    with _IndexWriter(str(path), np.uint16) as writer:
        writer.write([700, 0], None, [0, 1, 2])
    with pytest.raises(BurstError, match="a length of 0 of document 1"):
        lengths_in(path)
    with _IndexWriter(str(path), np.uint16) as writer:
        writer.write([700, 5], None, [0, 3])
    with pytest.raises(BurstError, match="documents of sequences that it does not have"):
        lengths_in(path)
