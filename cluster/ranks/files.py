"""Files that are written whole or not at all, with a checksum, and JSON files that are checked when they are read."""

import contextlib
import json
import os
import zlib
from collections.abc import Callable

from utils import UserError

CHUNK = 8 << 20  # bytes that are read or sent at a time


class File:
    """A file that is written piece by piece, with a checksum, into a folder that is made if need be.

    An error of the disk is raised by close() alone: put() does nothing after it, so that those that send the pieces
    need not know.
    """

    def __init__(self, path: str):
        self.path, self.size, self.checksum, self.error, self.file = path, 0, 0, None, None
        with self.keeping_errors():
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            self.file = open(path, "wb", buffering=0)

    @contextlib.contextmanager
    def keeping_errors(self):
        try:
            yield
        except OSError as error:
            error.filename = self.path
            self.error = self.error or error

    def put(self, data) -> None:
        """`data`: bytes, or what has them."""
        left = memoryview(data).cast("B")
        with self.keeping_errors():
            if self.error is None:
                self.size, self.checksum = self.size + len(left), zlib.crc32(left, self.checksum)
                while len(left):  # a full disk may take a part of it first
                    left = left[self.file.write(left):]

    def close(self) -> dict:
        """Waits until all is on the disk. Returns the facts that state.json has about a file. Raises OSError."""
        with self.keeping_errors():
            if self.file:
                with self.file:
                    os.fsync(self.file.fileno())
        if self.error:
            raise self.error
        return {"bytes": self.size, "crc32": f"{self.checksum:08x}"}


def write(path: str, content: bytes) -> dict:
    """Writes the file and waits until it is on the disk. Returns its facts. Raises OSError."""
    file = File(path)
    file.put(content)
    return file.close()


def replace(path: str, text: str) -> None:
    """Writes a file that appears under its name in one go. Raises OSError."""
    try:
        write(f"{path}.unfinished", text.encode())
        os.replace(f"{path}.unfinished", path)
    except OSError:  # a part of it would take room
        with contextlib.suppress(OSError):
            os.remove(f"{path}.unfinished")
        raise


def facts_of(path: str) -> dict:
    """As File.close() returns them, of a file that is there."""
    size = checksum = 0
    with open(path, "rb", buffering=0) as file:
        while part := file.read(CHUNK):
            size, checksum = size + len(part), zlib.crc32(part, checksum)
    return {"bytes": size, "crc32": f"{checksum:08x}"}


def sync_folder(path: str) -> None:
    """Waits until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unmarked(tokenizer):
    """A tokenizer without the mark that some editors put into chat_template.jinja: all texts would begin with it."""
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = tokenizer.chat_template.removeprefix("\ufeff")
    return tokenizer


def read_json(path: str, check: Callable, remedy: str = ""):
    """What check() makes of the content of a JSON file. Raises UserError where it is not as check() needs it."""
    try:
        with open(path, encoding="utf-8-sig") as file:  # without the mark that some editors put first
            return check(json.load(file))
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        advice = f": {remedy}" if remedy else ""
        raise UserError(f"{path} can't be read ({type(error).__name__}: {error}){advice}") from None
