"""Encryption at rest: AES-256-GCM for files and index rows, with a key that is never stored.

HKDF derives a key of its own for every file from a random salt. The messages of a file are numbered, so that a nonce
never repeats and pieces cannot change places. An encrypted store still shows the number of chunks, their sizes, when
they were written and used, and their keys and identities, which are hashes. Whoever knows a chunk's whole text and the
model can therefore tell whether it is stored.
"""

from __future__ import annotations

import base64
import binascii
import os
import secrets
from typing import Any

import numpy as np
import numpy.typing as npt

from fused_kv_llm.errors import ConfigError, MissingExtraError

__all__ = ["KEY_VARIABLE", "TAG_NBYTES", "Cipher", "FileCipher", "open_cipher"]

KEY_VARIABLE = "FUSED_KV_ENCRYPTION_KEY"
TAG_NBYTES = 16
_KEY_NBYTES = 32
_LABEL = "AES-256-GCM:"
_TEXT_MESSAGE = (1 << 64) - 1


def open_cipher(given: str | bytes | None) -> Cipher | None:
    """Return the cipher of an encryption key, from the caller or from ``FUSED_KV_ENCRYPTION_KEY``.

    Parameters
    ----------
    given : str, bytes or None
        32 bytes, or a text: 64 hexadecimal digits, or base64.

    Returns
    -------
    Cipher or None
        None if there is no key, here or in the environment.

    Raises
    ------
    ConfigError
        It is not such a key.
    MissingExtraError
        The package ``cryptography`` is not installed.
    """
    value = os.environ.get(KEY_VARIABLE) or None if given is None else given
    if value is None:
        return None
    key = _decode(value) if isinstance(value, str) else value
    if not isinstance(key, bytes) or len(key) != _KEY_NBYTES:
        # The message must not contain the value.
        raise ConfigError(
            f"An encryption key is {_KEY_NBYTES} bytes, as 64 hexadecimal digits or base64: make one with "
            "python -c 'import secrets; print(secrets.token_hex(32))', and keep it."
        )
    return Cipher(key)


def _decode(text: str) -> bytes | None:
    try:
        return bytes.fromhex(text) if len(text) == 2 * _KEY_NBYTES else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return None


def _aead(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise MissingExtraError("cryptography", "encryption") from error
    return AESGCM(key)


def _derive(key: bytes, salt: bytes | None, purpose: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), _KEY_NBYTES, salt, b"fused_kv_llm " + purpose).derive(key)


class FileCipher:
    """Encrypts the numbered messages of one file.

    Parameters
    ----------
    key : bytes
        The file's own key.
    label : str
        What the file's header says about the key: algorithm and salt.
    """

    def __init__(self, key: bytes, label: str) -> None:
        self.label = label
        self._aead = _aead(key)

    def seal(self, message: int, data: memoryview) -> bytes:
        """Return a message encrypted, followed by its tag."""
        return bytes(self._aead.encrypt(_nonce(message), data, None))

    def open_into(self, message: int, sealed: memoryview, target: memoryview) -> bool:
        """Decrypt a message into `target`; False if it was altered."""
        from cryptography.exceptions import InvalidTag

        try:
            self._aead.decrypt_into(_nonce(message), sealed, None, target)
        except InvalidTag:
            return False
        return True

    def seal_text(self, text: str, bound: bytes) -> str:
        """Return a text encrypted, in base64; it opens only together with `bound`."""
        return base64.b64encode(self._aead.encrypt(_nonce(_TEXT_MESSAGE), text.encode(), bound)).decode()

    def open_text(self, sealed: str, bound: bytes) -> str | None:
        """Return what ``seal_text`` was given; None if it was altered, or sealed with another key."""
        from cryptography.exceptions import InvalidTag

        try:
            return bytes(self._aead.decrypt(_nonce(_TEXT_MESSAGE), base64.b64decode(sealed), bound)).decode()
        except InvalidTag:
            return None


class Cipher:
    """Everything that a store encrypts with one key.

    Parameters
    ----------
    key : bytes
        32 bytes.

    Raises
    ------
    MissingExtraError
        The package ``cryptography`` is not installed.
    """

    def __init__(self, key: bytes) -> None:
        _aead(key)
        self._key = key
        # Tells whether a store was made with this key, and reveals nothing about the key.
        self.check = _derive(key, None, b"check").hex()
        self._rows = _aead(_derive(key, None, b"rows"))
        self._hashes = _derive(key, None, b"hashes")

    def new_file(self) -> FileCipher:
        """Return the cipher of a new file."""
        salt = secrets.token_bytes(16)
        return FileCipher(_derive(self._key, salt, b"file"), _LABEL + salt.hex())

    def open_file(self, label: str) -> FileCipher | None:
        """Return the cipher of a file by its label; None if the label is not one."""
        if not label.startswith(_LABEL):
            return None
        return FileCipher(_derive(self._key, bytes.fromhex(label.removeprefix(_LABEL)), b"file"), label)

    def seal_row(self, data: bytes, bound: bytes) -> bytes:
        """Return a column of a row encrypted; it opens only together with `bound`."""
        nonce = secrets.token_bytes(12)
        return nonce + bytes(self._rows.encrypt(nonce, data, bound))

    def open_row(self, sealed: bytes, bound: bytes) -> bytes:
        """Return what ``seal_row`` was given.

        Raises
        ------
        ValueError
            It was altered.
        """
        from cryptography.exceptions import InvalidTag

        try:
            return bytes(self._rows.decrypt(sealed[:12], sealed[12:], bound))
        except InvalidTag as error:
            raise ValueError("the row was altered") from error

    def seal_hashes(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Encrypt pairs of content hashes ``[n, 2]``.

        A pair is one AES block, and a pair occurs twice only for equal texts. A permutation of blocks is therefore
        enough, and takes milliseconds for a million pairs.
        """
        return self._permute(hashes, "encryptor")

    def open_hashes(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Return what ``seal_hashes`` was given."""
        return self._permute(hashes, "decryptor")

    def _permute(self, hashes: npt.NDArray[np.uint64], direction: str) -> npt.NDArray[np.uint64]:
        from cryptography.hazmat.primitives.ciphers import Cipher as BlockCipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import ECB

        context = getattr(BlockCipher(AES(self._hashes), ECB()), direction)()
        data = context.update(np.ascontiguousarray(hashes, dtype="<u8").tobytes()) + context.finalize()
        return np.frombuffer(data, dtype="<u8").reshape(-1, 2)


def _nonce(message: int) -> bytes:
    return message.to_bytes(12, "big")
