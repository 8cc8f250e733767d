"""Real text as a Megatron data set of bytes: PREFIX.bin and PREFIX.idx for --data-path PREFIX.

    python examples/data.py data/python_docs            # text that comes with every Python
    python examples/data.py data/mine notes.txt *.md    # your own text files, a document each

A token is one UTF-8 byte; 256 ends a document. With --multiple, several 256s pad it, so that each
rank has two chunks of each document (pretrain_gpt.py --pack-documents). Megatron reads the result
with --tokenizer-type NullTokenizer --vocab-size 257.
"""

import ast
import importlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

END_OF_DOCUMENT = 256
TOKEN_DTYPE = np.uint16


def python_documents() -> Iterator[str]:
    """Yield pydoc's topics, then the standard library's docstrings, one document per module."""
    topics = importlib.import_module("pydoc_data.topics").topics
    yield from (topics[name] for name in sorted(topics))
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted((*library.glob("*.py"), *library.glob("*/*.py"))):
        if {"site-packages", "test", "idlelib", "__pycache__"}.isdisjoint(path.parts):
            yield docstrings(path)


def docstrings(path: Path) -> str:
    """Return the docstrings of a module, its classes and its functions, joined."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (
        node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, documented)
    )
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


def token_documents(texts: Iterable[str], multiple: int = 1) -> list[np.ndarray]:
    """Return the tokens of each non-empty text: its bytes, then one or more END_OF_DOCUMENT, up to
    a multiple of `multiple` tokens."""
    encoded = (np.frombuffer(text.encode(), np.uint8) for text in texts if text.strip())
    return [
        np.append(text, [END_OF_DOCUMENT] * (multiple - len(text) % multiple)).astype(TOKEN_DTYPE)
        for text in encoded
    ]


def holds(prefix: Path, documents: list[np.ndarray]) -> bool:
    """Whether PREFIX.bin already holds these tokens (and PREFIX.idx, written last, exists)."""
    written = prefix.with_name(f"{prefix.name}.bin")
    if not (prefix.with_name(f"{prefix.name}.idx").exists() and written.exists()):
        return False
    return np.array_equal(np.fromfile(written, TOKEN_DTYPE), np.concatenate(documents))


def write(prefix: Path, documents: list[np.ndarray]) -> None:
    """Write PREFIX.bin and PREFIX.idx; other processes only ever see complete files."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    partial = f"{prefix}.partial{os.getpid()}"
    builder = IndexedDatasetBuilder(f"{partial}.bin", dtype=TOKEN_DTYPE)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{partial}.idx")
    for suffix in (".bin", ".idx"):
        os.replace(f"{partial}{suffix}", f"{prefix}{suffix}")


def main(
    prefix: Annotated[Path, typer.Argument(help="writes PREFIX.bin and PREFIX.idx")],
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="text files (UTF-8); none: Python's own documentation"),
    ] = None,
    multiple: Annotated[int, typer.Option(min=1, help="tokens of documents, padded")] = 1,
) -> None:
    """Make a Megatron data set of bytes from text, unless it exists already."""
    texts = (path.read_text(encoding="utf-8") for path in files) if files else python_documents()
    documents = token_documents(texts, multiple)
    if not documents:
        raise typer.BadParameter("no text in the files given")
    if made := not holds(prefix, documents):
        write(prefix, documents)
    num_tokens = sum(map(len, documents))
    state = "wrote" if made else "already there:"
    typer.echo(
        f"{state} {prefix}.bin, {prefix}.idx: {len(documents)} documents, {num_tokens} tokens"
    )
    typer.echo(f"--data-path {prefix} --tokenizer-type NullTokenizer --vocab-size 257")


if __name__ == "__main__":
    typer.run(main)
