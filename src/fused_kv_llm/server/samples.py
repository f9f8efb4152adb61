"""Files that a server has as documents from its beginning, such as the demo's handbook."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .desk import DocumentDesk
from .library_schema import ENDED, Owner

__all__ = ["add_files"]

_NOBODY = Owner("", None)
_MOST = 100_000


def add_files(desk: DocumentDesk, paths: Sequence[Path]) -> int:
    """Have files ingested for requests without a key, and go on with those whose ingestion was interrupted.

    Parameters
    ----------
    desk : DocumentDesk
    paths : sequence of Path
        Of files, whose names are the documents'; a document of the same name is left as it is.

    Returns
    -------
    int
        How many are ingested now.
    """
    if not paths:
        return 0
    begun = 0
    with desk.open(_NOBODY, make=True) as opened:
        library = opened.library
        known = {document.name: document for document in library.documents(_MOST)}
        unfinished = {job.document: job for job in library.jobs(_MOST) if job.state in ENDED}
        for path in paths:
            document = known.get(path.name)
            if document is None:
                id_, job = library.add(path.name, path.suffix, path.read_bytes(), "{}", None)
                desk.jobs.start(_NOBODY, job, id_)
                begun += 1
            elif not document.ready and document.id in unfinished:
                begun += desk.jobs.resume(library, _NOBODY, unfinished[document.id].id, document.id)
    return begun
