"""PDFs for tests, written by hand: small ones, and ones that are made to do harm."""

from __future__ import annotations

import zlib
from collections.abc import Sequence


def pdf(contents: Sequence[bytes], *, claimed_pages: int | None = None) -> bytes:
    """Return a PDF with a page for each content stream."""
    count = len(contents)
    kids = b" ".join(b"%d 0 R" % (4 + 2 * number) for number in range(count))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Count %d/Kids[%s]>>" % (claimed_pages or count, kids),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for number, content in enumerate(contents):
        packed = zlib.compress(content)
        page = b"<</Type/Page/Parent 2 0 R/Resources<</Font<</F 3 0 R>>>>/MediaBox[0 0 300 300]/Contents %d 0 R>>"
        objects.append(page % (5 + 2 * number))
        objects.append(b"<</Filter/FlateDecode/Length %d>>stream\n%s\nendstream" % (len(packed), packed))
    body, places = b"%PDF-1.4\n", []
    parts = [body]
    place = len(body)
    for number, content in enumerate(objects, 1):
        written = b"%d 0 obj%s endobj\n" % (number, content)
        places.append(place)
        parts.append(written)
        place += len(written)
    table = b"".join(b"%010d 00000 n \n" % one for one in places)
    trailer = b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, place)
    parts.append(b"xref\n0 %d\n0000000000 65535 f \n%s%s" % (len(objects) + 1, table, trailer))
    return b"".join(parts)


def shown(text: str) -> bytes:
    """Return a content stream that shows a text."""
    return b"BT /F 12 Tf 20 200 Td (%s) Tj ET" % text.encode()


def bomb(nbytes: int) -> bytes:
    """Return a PDF whose only page takes so many bytes when it is unpacked, and about a thousandth of them before."""
    return pdf([shown("boom") + b" " * nbytes])
