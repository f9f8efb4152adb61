"""Reading a file that nobody vouches for: a program that limits itself, reads one file and writes its passages as JSON.

The server runs it as a process, so that a file which takes all memory or never ends takes only that process with it.
"""

from __future__ import annotations

import json
import resource
import sys
import warnings
from pathlib import Path

__all__ = ["main"]

_OUTPUT_BYTES_PER_CHAR = 6


def main() -> None:
    """Read the file that the first argument names within the limits of the others, which are JSON."""
    path, limits = Path(sys.argv[1]), json.loads(sys.argv[2])
    _limit(limits["memory_bytes"], limits["cpu_s"], _OUTPUT_BYTES_PER_CHAR * limits["max_chars"] + 2**20)
    answer: dict[str, str | list[str]]
    try:
        answer = {"texts": _texts(path, **{name: limits[name] for name in ("chunk_chars", "max_pages", "max_chars")})}
    except MemoryError:
        answer = {"error": f"The document needs more memory than {limits['memory_bytes'] // 2**20} MiB to be read"}
    sys.stdout.write(json.dumps(answer))


def _limit(memory_bytes: int, cpu_s: int, output_bytes: int) -> None:
    for kind, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, output_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def _texts(path: Path, *, chunk_chars: int, max_pages: int, max_chars: int) -> list[str]:
    # Only now: what is imported counts against the limits too.
    from fused_kv_llm.demo.passages import read_passages
    from fused_kv_llm.errors import CorpusError

    warnings.simplefilter("ignore")
    try:
        texts = [passage.text for passage in read_passages([path], chunk_chars=chunk_chars, max_pages=max_pages)]
    except CorpusError as error:
        # The client knows its document, and is told no paths.
        return _refuse(str(error).replace(repr(str(path)), "the document").replace(str(path), "the document"))
    except (MemoryError, ImportError):
        raise
    except Exception as error:  # parsers fail in many ways, and the file is the cause of all
        return _refuse(f"the document cannot be read ({type(error).__name__})")
    if sum(map(len, texts)) > max_chars:
        return _refuse(f"the document has more than {max_chars:,} characters of text")
    return texts


def _refuse(why: str) -> list[str]:
    sys.stdout.write(json.dumps({"error": why[0].upper() + why[1:]}))
    sys.exit(0)


if __name__ == "__main__":
    main()
